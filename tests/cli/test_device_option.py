"""``--device``: every command that loads a model has it, and loads the model there."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from typer.testing import CliRunner, Result

from speccompile.cli import app
from speccompile.cli.devices import choose_device, choose_shared_device
from speccompile.errors import InvalidInput, InvalidOption, NeedsCuda
from support.errors import raises
from support.gpus import NAME, pretend_gpus
from support.ports import free_port

#: Arguments with which each command loads its model; FILE and FOLDER exist, NEW does not, and PORT is free.
LOADING = {
    "demo": ["--model", "tiny"],
    "generate": ["tiny", "--prompt", "a"],
    "serve": ["tiny", "--mode", "ngram", "--port", "PORT"],
    "inspect": ["tiny"],
    "bench": ["tiny", "--output", "NEW"],
    "families": ["llama"],
    "calibrate": ["tiny", "--texts", "FILE", "--output", "NEW"],
    "measure-weights": ["tiny", "--text", "FILE"],
    "save-hidden-states": ["tiny", "--data", "FILE", "--output", "NEW"],
    "make-texts": ["tiny", "--output", "NEW"],
    "train-head": ["tiny", "--texts", "FOLDER", "--output", "NEW"],
}
#: They read what runs have written.
WITHOUT_A_MODEL = {"policy-lab", "bench-report", "bench-replay"}
#: Weights are packed on the CPU, also for a machine with a GPU.
ON_THE_CPU = {"quantize"}
REACHED = "the model is loaded on"


def commands(of: Any) -> Iterator[str]:
    group = typer.main.get_command(of)
    yield from group.commands  # type: ignore[attr-defined]


def options_of(command: str) -> set[str]:
    parameters = typer.main.get_command(app).commands[command].params  # type: ignore[attr-defined]
    return {option for parameter in parameters for option in parameter.opts}


@pytest.fixture
def stops_at_the_loader(monkeypatch: pytest.MonkeyPatch) -> None:
    """Loading a model, or a family's, ends the command with an error that names the device."""

    def stop(device: torch.device) -> None:
        raise InvalidInput(name="MODEL", reason=f"{REACHED} {device}")

    monkeypatch.setattr("speccompile.cli.models.tiny_model", stop)
    monkeypatch.setattr("speccompile.cli.families.survey", lambda family, *, backend, device: stop(device))


def call(command: str, folder: Path, *more: str) -> Result:
    (folder / "file").write_text("a text")
    paths = {"FILE": str(folder / "file"), "FOLDER": str(folder), "NEW": str(folder / "new")}
    paths["PORT"] = str(free_port())
    arguments = [paths.get(argument, argument) for argument in LOADING[command]]
    return CliRunner().invoke(app, [command, *arguments, *more], catch_exceptions=False)


def test_every_command_that_loads_a_model_is_tested_here() -> None:
    assert set(commands(app)) == LOADING.keys() | WITHOUT_A_MODEL | ON_THE_CPU
    assert not any("--device" in options_of(command) for command in (*WITHOUT_A_MODEL, *ON_THE_CPU))


@pytest.mark.parametrize("command", LOADING)
@pytest.mark.parametrize(("given", "device"), [("cpu", "cpu"), ("cuda", "cuda:0"), ("cuda:1", "cuda:1")])
@pytest.mark.usefixtures("stops_at_the_loader")
def test_the_model_is_loaded_on_the_device(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, command: str, given: str, device: str
) -> None:
    pretend_gpus(monkeypatch, 2)
    result = call(command, tmp_path, "--device", given)
    assert f"{REACHED} {device}." in result.stderr and result.exit_code == 2
    assert "note:" not in result.stderr


@pytest.mark.parametrize("command", LOADING)
@pytest.mark.usefixtures("stops_at_the_loader")
def test_a_gpu_is_used_by_itself_and_stated(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, command: str) -> None:
    pretend_gpus(monkeypatch, 1)
    # The models of families are tiny.
    device = "cpu" if command == "families" else "cuda:0"
    result = call(command, tmp_path)
    assert f"{REACHED} {device}." in result.stderr
    note = f"note: the model runs on cuda:0 ({NAME}); --device cpu chooses the CPU"
    assert (note in result.stderr.splitlines()) == (device == "cuda:0")


@pytest.mark.parametrize("command", LOADING)
@pytest.mark.usefixtures("stops_at_the_loader")
def test_without_a_gpu_nothing_is_stated(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, command: str) -> None:
    pretend_gpus(monkeypatch, 0)
    result = call(command, tmp_path)
    assert f"{REACHED} cpu." in result.stderr and "note:" not in result.stderr


@pytest.mark.parametrize("command", LOADING)
@pytest.mark.usefixtures("stops_at_the_loader")
def test_a_device_that_does_not_exist_is_an_error_before_the_model_is_loaded(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, command: str
) -> None:
    pretend_gpus(monkeypatch, 1)
    for device, reason in (("cuda:1", "torch finds one GPU, cuda:0"), ("tpu", "speccompile has no kernels for 'tpu'")):
        result = call(command, tmp_path, "--device", device)
        assert result.exit_code == 2 and REACHED not in result.stderr
        assert f"error: device {device!r} cannot be used: {reason}. Devices are cpu, cuda, and" in result.stderr


@pytest.mark.parametrize("command", [name for name in LOADING if "--backend" in options_of(name)])
@pytest.mark.usefixtures("stops_at_the_loader")
def test_cuda_graphs_on_a_cpu_are_refused_before_the_model_is_loaded(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, command: str
) -> None:
    pretend_gpus(monkeypatch, 0)
    result = call(command, tmp_path, "--backend", "cudagraph")
    assert result.exit_code == 2 and REACHED not in result.stderr
    assert "this one is on cpu. Move it with model.to('cuda') (--device cuda on the command line)" in result.stderr


def test_integers_of_a_checkpoint_run_on_the_cpu(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pretend_gpus(monkeypatch, 1)
    assert choose_device(None, stored=True) == torch.device("cpu")
    assert "note: the model runs on the CPU, as integers" in capsys.readouterr().err
    with raises(InvalidOption, name="--device", value="cuda", reason=re.compile("give --device cpu")):
        choose_device("cuda", stored=True)
    with raises(NeedsCuda, name="cudagraph"):
        choose_device(None, "cudagraph", stored=True)
    pretend_gpus(monkeypatch, 0)
    capsys.readouterr()
    assert choose_device(None, stored=True) == torch.device("cpu")
    assert capsys.readouterr().err == ""


def test_under_torchrun_transformers_chooses_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_gpus(monkeypatch, 2)
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert choose_shared_device(None) is None
    with raises(InvalidOption, name="--device", value="cuda:1", reason=re.compile("GPUs of their local ranks")):
        choose_shared_device("cuda:1")
    # Each process of a training has a whole target.
    assert choose_device("cuda") == torch.device("cuda", 1)

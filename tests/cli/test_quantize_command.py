"""``speccompile quantize``."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import Result
from typer.testing import CliRunner

from speccompile.cli import app
from speccompile.quantized import packed_writer


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["quantize", *map(str, arguments)])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("quantize") / "tiny"
    result = run("tiny", "--output", folder)
    assert result.exit_code == 0, result.output
    assert "0.1 MiB of weights" in result.stdout
    return folder


def test_a_folder_is_verified_and_a_changed_one_refused(folder: Path) -> None:
    result = run(folder, "--verify")
    assert result.exit_code == 0 and "tensors are as they were written" in result.stdout
    (file,) = folder.glob("packed-*.safetensors")
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    try:
        result = run(folder, "--verify")
        assert result.exit_code == 2 and "SHA-256" in result.stderr
    finally:
        data[-1] ^= 1
        file.write_bytes(data)


def test_a_folder_is_the_model_of_other_commands(folder: Path) -> None:
    result = CliRunner().invoke(
        app, ["generate", str(folder), "--prompt", "hello", "--max-new-tokens", "4", "--tiers", "0", "--mode", "none"]
    )
    assert result.exit_code == 0 and "4 tokens in" in result.output, result.output


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["tiny"], "--output=None is not valid: it is missing"),
        (["tiny", "--verify"], "it is not a folder that quantize wrote"),
        (["tiny", "--verify", "--output", "folder"], "--verify writes nothing"),
        (["tiny", "--output", "folder", "--weights", "int3"], "choose from int4, int8, stored"),
        (["tiny", "--output", "folder", "--weights", "stored"], "tiny is not a checkpoint of integers"),
        (["tiny", "--output", "no/such/folder"], "there is no folder"),
        (["tiny", "--output", "folder", "--head", "."], "it is not the folder of a draft head"),
    ],
)
def test_what_is_refused(arguments: list[str], says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    result = run(*arguments)
    assert result.exit_code == 2 and says in result.stderr, result.output
    assert not list(tmp_path.iterdir())


def test_a_full_disk_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(packed_writer, "_write_tensor", full)
    result = run("tiny", "--output", tmp_path / "folder")
    assert result.exit_code == 2 and "it cannot be written" in result.stderr and "No space left" in result.stderr
    assert not list(tmp_path.iterdir())

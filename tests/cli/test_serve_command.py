"""``speccompile serve``: a process that serves until a signal."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import httpx2
import pytest
import torch
from typer.testing import CliRunner

from speccompile.cli import app
from speccompile.cli.models import load
from speccompile.heads import DFlashHead, save_dflash
from speccompile.serve import server
from speccompile.serve.server import is_loopback
from speccompile.serve.service import Service
from speccompile.training.online_learner import OnlineLearner
from support.ports import free_port
from support.serving import Client

START = [
    "serve",
    "tiny",
    "--mode",
    "ngram",
    "--tiers",
    "0,3",
    "--backend",
    "eager",
    "--max-len",
    "64",
    "--max-batch",
    "2",
]


@pytest.fixture
def log(tmp_path: Path) -> Iterator[IO[str]]:
    with (tmp_path / "log").open("w+") as file:
        yield file


def test_a_bound_port_is_found_before_the_model_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("speccompile.cli.serve.run", lambda *_, **__: pytest.fail("it loads the model"))
    with socket.create_server(("127.0.0.1", 0)) as bound:
        port = bound.getsockname()[1]
        result = CliRunner().invoke(app, [*START, "--port", str(port)])
    assert result.exit_code == 2
    assert f"127.0.0.1:{port} cannot be bound (Address already in use)" in " ".join(result.stderr.split())


def test_an_adapter_that_does_not_exist_is_found_before_the_model_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("speccompile.cli.serve.run", lambda *_, **__: pytest.fail("it loads the model"))
    result = CliRunner().invoke(app, [*START, "--port", str(free_port()), "--lora-modules", "legal=./nowhere"])
    assert result.exit_code == 2
    assert "the adapter 'legal' (./nowhere) cannot be added: no such folder exists" in result.stderr


def test_it_serves_until_a_signal_and_finishes_what_runs(log: IO[str]) -> None:
    port = free_port()
    command = [sys.executable, "-m", "speccompile", *START, "--port", str(port), "--api-key", "secret", "--warm"]
    process = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        until, address = time.monotonic() + 120, f"http://127.0.0.1:{port}"
        while True:
            assert process.poll() is None and time.monotonic() < until, "the server does not start"
            try:
                assert httpx2.get(f"{address}/health").status_code == 200
                break
            except httpx2.TransportError:
                time.sleep(0.05)
        body = {"prompt": "ab", "temperature": 0, "max_tokens": 8}
        assert httpx2.post(f"{address}/v1/completions", json=body).status_code == 401
        answer = httpx2.post(f"{address}/v1/completions", json=body, headers={"Authorization": "Bearer secret"})
        assert answer.json()["usage"]["completion_tokens"] == 8 and answer.json()["model"] == "tiny"
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
    finally:
        process.kill()
    log.seek(0)
    text = log.read()
    assert f"serving tiny at {address}" in text and "Application shutdown complete" in text
    assert "POST /v1/completions 401" in text and "2 prompt tokens, 8 new" in text
    assert "secret" not in text and "Traceback" not in text


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--mode", "nothing"], "unknown mode 'nothing'"),
        (["--mode", "prediction+nothing"], "unknown mode 'nothing'"),
        (["--tiers", "0,tree:4"], "tree:NODES:DEPTH:BRANCHES"),
        (["--max-body-bytes", "5"], "--max-body-bytes"),
        (["--api-key", ""], "api_key"),
        (["--state-checkpoints", "0"], "--state-checkpoints"),
        (["--port", "0"], "--port"),
    ],
)
def test_wrong_options_are_errors_before_the_model_is_loaded(arguments: list[str], says: str) -> None:
    result = CliRunner().invoke(app, [*START, *arguments], catch_exceptions=False)
    assert result.exit_code == 2 and says in result.output.replace("\n", " ")


@pytest.mark.parametrize(
    ("mode", "tiers", "drafters"),
    [
        ("auto", "0,1", ("prediction", "ngram")),
        ("prediction+suffix", "0,1", ("prediction", "suffix")),
        ("auto", "0,tree:4:2:2", ("ngram",)),
    ],
)
def test_drafters_and_trees(monkeypatch: pytest.MonkeyPatch, mode: str, tiers: str, drafters: tuple[str, ...]) -> None:
    served = []

    def ask(service: Service, host: str, port: int) -> None:
        client = Client(service)
        body = {"prompt": "ab", "max_tokens": 4, "temperature": 0}
        answers = [client.post("/v1/completions", body | {"logprobs": count}).status_code for count in (0, 2)]
        served.append((service.drafters, answers))

    monkeypatch.setattr(server, "run_server", ask)
    result = CliRunner().invoke(app, [*START, "--mode", mode, "--tiers", tiers], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    assert served == [(drafters, [200, 200])]


def test_a_memory_is_read_and_written(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path, learned = tmp_path / "memory", []

    def ask(service: Service, host: str, port: int) -> None:
        learned.append(int(service.spec.arena["recycle_keys"].count_nonzero()))
        Client(service).post("/v1/completions", {"prompt": "ab", "max_tokens": 12})
        service.close()

    monkeypatch.setattr(server, "run_server", ask)
    for _ in range(2):
        result = CliRunner().invoke(app, [*START, "--mode", "recycle", "--memory", str(path)], catch_exceptions=False)
        assert result.exit_code == 0, result.output
    assert learned[0] == 0 < learned[1]
    result = CliRunner().invoke(app, [*START, "--mode", "recycle", "--memory", str(tmp_path / "no" / "memory")])
    assert result.exit_code == 2 and "memory=" in result.stderr and "cannot be opened" in result.stderr
    result = CliRunner().invoke(app, [*START, "--mode", "ngram", "--memory", str(path)])
    assert result.exit_code == 2 and "learns nothing from earlier requests" in result.stderr


def test_a_head_learns_and_drafts_at_the_next_start(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    model, _ = load("tiny")
    given, learned, made = tmp_path / "given", tmp_path / "learned", []
    save_dflash(DFlashHead.random(model, 3, block_size=4, taps=(0,)), given)

    def ask(service: Service, host: str, port: int) -> None:
        Client(service).post("/v1/completions", {"prompt": "ab", "max_tokens": 12})
        learner = service.spec.learner
        assert isinstance(learner, OnlineLearner)
        head = learner._live.get_parameter("fc.weight")
        made.append(head.detach().clone())
        with torch.no_grad():
            head.add_(1.0)
        service.close()

    monkeypatch.setattr(server, "run_server", ask)
    arguments = [*START, "--mode", "dflash", "--tiers", "0,1", "--option", f"draft={given}", "--learn", str(learned)]
    for _ in range(2):
        result = CliRunner().invoke(app, arguments, catch_exceptions=False)
        assert result.exit_code == 0, result.output
    torch.testing.assert_close(made[1], made[0] + 1.0, rtol=2e-3, atol=2e-3)
    named = [*START, "--mode", "auto", "--tiers", "0,1", "--option", f"head={given}", "--learn", str(learned)]
    result = CliRunner().invoke(app, named, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    torch.testing.assert_close(made[2], made[0] + 2.0, rtol=2e-3, atol=2e-3)
    (tmp_path / "file").write_text("")
    result = CliRunner().invoke(app, [*arguments[:-1], str(tmp_path / "file")])
    assert result.exit_code == 2 and "learn=" in result.stderr and "cannot be written" in result.stderr
    result = CliRunner().invoke(app, [*START, "--mode", "ngram", "--learn", str(tmp_path / "other")])
    assert result.exit_code == 2 and "no head that can be trained" in result.stderr
    (given / "config.json").write_text("{}")
    result = CliRunner().invoke(app, [*arguments[:-1], str(given)])
    assert result.exit_code == 2 and "name another folder" in result.stderr


def test_other_machines_reach_no_loopback_address() -> None:
    assert all(map(is_loopback, ("127.0.0.1", "127.1.2.3", "::1", "localhost")))
    assert not any(map(is_loopback, ("0.0.0.0", "::", "192.0.2.1", "example")))

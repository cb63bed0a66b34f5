"""The soak of the server: it passes, and what it would not pass."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from typing import Any

import pytest
import typer

from benchmarks import server_soak
from benchmarks.server_soak import SHARES, Soak
from speccompile.serve.continuation import Continuation


def run(**options: Any) -> int:
    with pytest.raises(typer.Exit) as caught:
        server_soak.main(**{"minutes": 0.05, "rate": 12.0, "new_tokens": 12, **options})
    return caught.value.exit_code


def test_a_short_soak(capsys: pytest.CaptureFixture[str]) -> None:
    code = run()
    shown = capsys.readouterr()
    assert code == 0, shown.out + shown.err
    for part in ("requests in 0.05 minutes", "after the warm-up", "requests that hung, and other problems: 0"):
        assert part in shown.out


def test_a_wrong_text_is_found(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    answer = server_soak.greedy_answer
    monkeypatch.setattr(server_soak, "greedy_answer", lambda *arguments: answer(*arguments)[:-1] + "?")
    assert run() == 1
    assert " is not " in capsys.readouterr().err


def test_a_request_that_hangs_is_found(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    pieces = Continuation.pieces
    hung: list[Continuation] = []

    async def pieces_or_none(self: Continuation) -> Any:
        if not hung:
            hung.append(self)
            await asyncio.sleep(60)
        async for piece in pieces(self):
            yield piece

    monkeypatch.setattr(server_soak, "PATIENCE", 4.0)
    monkeypatch.setattr(Continuation, "pieces", pieces_or_none)
    assert run() == 1
    assert "no end after 4 s" in capsys.readouterr().err


def soak_over(memory: Callable[[float], float]) -> Soak:
    """One hour in which memory has a size by the second, in units of 1 GiB."""
    soak: Any = Soak("", None, {}, 1, 1.0, random.Random(0))  # type: ignore[arg-type]
    soak.memory = [(second, int(memory(second) * 2**30)) for second in range(0, 3601, 6)]
    soak.counts.update(SHARES)
    found: Soak = soak
    return found


def test_memory_that_grows_after_the_warm_up_is_found() -> None:
    rng = random.Random(0)
    for share, fails in ((0.0, False), (0.01, False), (0.03, True), (0.5, True)):
        soak = soak_over(lambda second, share=share: 1 + share * second / 3000 + rng.uniform(0, 0.002))
        soak.check_whole_run(3600)
        assert bool(soak.problems) == fails, (share, soak.problems)
    warming = soak_over(lambda second: 1 + min(second, 590) / 600)
    warming.check_whole_run(3600)
    assert not warming.problems and warming.growth == 0
    short = soak_over(lambda second: 1 + second)
    short.check_whole_run(180)
    assert not short.problems


def test_a_kind_of_request_that_never_ends_well_is_found() -> None:
    soak = soak_over(lambda _: 1.0)
    del soak.counts["streamed"]
    soak.check_whole_run(3600)
    assert soak.problems == ["streamed: none has ended"]

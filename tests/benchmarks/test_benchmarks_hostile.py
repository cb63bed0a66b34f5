"""Hostile clients: what each attack receives, and what a run would not pass."""

from __future__ import annotations

import asyncio
import io
import random
from collections.abc import Sequence

import pytest
import typer
from rich.console import Console

from benchmarks.attacks import ATTACKS, CLOSED, HUNG, LEFT, Target
from benchmarks.attacks.attack import Attack, attack
from benchmarks.first_token import Answer
from benchmarks.health import Probe
from benchmarks.hostile_mix import faults_of_log, named
from benchmarks.hostile_report import Bounds, Hit, Mix, attacks_table, summary_table
from benchmarks.memory import Reading

MIB = 2**20
STALLED = named(["body that stalls"])


def mix(
    *,
    health: Sequence[float] = (0.01,) * 300,
    growth: float = 0.0,
    outcome: int | str = 408,
    seconds: float = 600.0,
    status: int = 200,
) -> Mix:
    """What is seen of a sound server, but for what is given. Memory grows by a share of itself in each half."""
    return Mix(
        0.0,
        seconds,
        [Probe(float(number), 0.0, late, status) for number, late in enumerate(health)],
        [Hit("body that stalls", 10.0, 70.0, outcome)],
        [Answer("a", False, False, 0.2, "b")],
        [Reading(at, int(500 * MIB * (1 + growth * at / 300))) for at in range(0, 601, 5)],
    )


def problems(seen: Mix) -> list[str]:
    return seen.problems(Bounds(), STALLED)


def test_a_sound_server_has_no_problems() -> None:
    assert not problems(mix())
    assert not problems(mix(health=[0.01] * 300 + [5.0, 5.0]))
    assert not problems(mix(growth=0.01))
    assert not problems(mix(growth=0.5, seconds=120))


@pytest.mark.parametrize(
    ("seen", "problem"),
    [
        (mix(health=[0.01] * 90 + [0.6] * 10), "/health: 0.60 s at p99"),
        (mix(health=[]), "/health: nan s at p99"),
        (mix(status=503), "/health: status 503, 300 times"),
        (mix(growth=0.05), "memory grew by"),
        (mix(outcome=500), "body that stalls: 500, 1 times"),
        (mix(outcome=HUNG), "body that stalls: hung, 1 times"),
    ],
)
def test_what_a_sound_server_does_not_do_is_a_problem(seen: Mix, problem: str) -> None:
    (found,) = problems(seen)
    assert found.startswith(problem)


def test_a_wrong_text_and_a_fault_of_the_log_are_problems() -> None:
    seen = mix()
    seen.wrong, seen.faults = ["'a' is not 'b'"], faults_of_log(io.BytesIO(b"INFO a\nTraceback (most\n" + b"a" * 3000))
    assert len(problems(seen)) == 3


def test_tables_have_the_figures_of_the_run() -> None:
    console = Console(file=io.StringIO(), width=140, record=True)
    for table in (summary_table(mix(growth=0.1)), attacks_table(mix(), STALLED)):
        console.print(table)
    shown = console.export_text()
    # At 60, 300 and 600 seconds.
    assert "510 / 550 / 600 MiB" in shown and "+10.00 MiB a minute" in shown
    assert "0.010 / 0.010 / 0.010 s" in shown and "1 x 408" in shown


def test_attacks_have_names_and_an_unknown_one_is_refused() -> None:
    assert len({item.name for item in ATTACKS}) == len(ATTACKS) > 80
    assert [item.name for item in named(["no_json", "deep nesting"])] == ["deep nesting", "no json"]
    with pytest.raises(typer.BadParameter, match="no such attack"):
        named(["nothing"])


def outcomes(*attacks: Attack) -> list[int | str]:
    """Of attacks on a server that answers each head that it can read with status 400."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 0.1)
            writer.write(b"HTTP/1.1 400 Bad Request\r\nconnection: close\r\n\r\n")
        except (TimeoutError, ConnectionError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            pass
        writer.close()

    async def run() -> list[int | str]:
        async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
            port = server.sockets[0].getsockname()[1]
            target = Target("127.0.0.1", port, None, 64, random.Random(0))
            return list(await asyncio.gather(*(item.perform(target) for item in attacks)))

    return asyncio.run(run())


def test_an_attack_has_the_status_of_the_answer_or_what_happened_without_one() -> None:
    @attack(LEFT)
    async def has_a_fault(target: Target) -> int | str:
        raise ValueError("of the attack")

    chosen = named(["unknown field", "head that stalls", "leaves within the body"])
    assert outcomes(*chosen, has_a_fault) == [CLOSED, 400, LEFT, "ValueError('of the attack')"]

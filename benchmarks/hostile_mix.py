"""Effect of hostile clients on others: honest clients over HTTP, and beside them attacks by turns.

``python -m benchmarks.hostile_mix --minutes 10``; see README.md beside this file. Exit code 1 if a text is wrong,
``/health`` is slow, memory grows, or an attack is answered by what it should not be.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import re
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import IO, Annotated

import httpx2
import typer
from rich.console import Console

from benchmarks.attacks import ATTACKS, Attack, Target
from benchmarks.first_token import Load, run_load, wrong_texts
from benchmarks.health import probed
from benchmarks.hostile_report import Bounds, Hit, Mix, attacks_table, summary_table
from benchmarks.machine import describe
from benchmarks.memory import Reading, children, resident_bytes
from benchmarks.server import free_port, running
from speccompile.cli.models import load
from speccompile.cli.session import session
from speccompile.utils.progress import task

#: Hostile clients have this address, where the server is on this machine: honest clients have another one.
HOSTILE_ADDRESS = "127.0.0.2"
#: Mean seconds between two attacks of a client.
PAUSE = 0.3
#: Seconds between two readings of memory.
READ_EVERY = 5.0
#: Most characters of a line of the log.
LONGEST_LINE = 2000
#: Seconds after the last client in which the last request ends.
IDLE_SECONDS = 30.0


async def attack_by_turns(target: Target, attacks: Sequence[Attack], hits: list[Hit]) -> None:
    """One hostile client: all attacks in a random order, again and again, until it is cancelled."""
    while True:
        for attack in target.rng.sample(attacks, len(attacks)):
            begun = time.monotonic()
            outcome = await attack.perform(target)
            hits.append(Hit(attack.name, begun, time.monotonic(), outcome))
            await asyncio.sleep(target.rng.expovariate(1 / PAUSE))


async def run_mix(
    mix: Mix, address: str, honest: Load, attacks: Sequence[Attack], *, hostile: int, process: int | None, seed: int
) -> None:
    """Honest clients for their time, so many hostile ones beside them, and the memory of the server's process."""
    url = httpx2.URL(address)
    max_len = httpx2.get(f"{address}/v1/models").json()["data"][0]["max_model_len"]
    source = HOSTILE_ADDRESS if url.host == "127.0.0.1" else None
    rngs = [random.Random(f"{seed} hostile {number}") for number in range(hostile)]
    targets = [Target(url.host, url.port or 80, source, max_len, rng) for rng in rngs]

    async def attack() -> None:
        """Until the honest clients begin their last requests: these may wait for a while."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(mix.seconds):
                clients = [attack_by_turns(target, attacks, mix.hits) for target in targets]
                await asyncio.gather(read_memory(mix, process), *clients)

    _, mix.answers = await asyncio.gather(attack(), run_load(address, honest, seed))
    await _check_idle(mix, address)


async def read_memory(mix: Mix, process: int | None) -> None:
    """Memory of the process, and of the processes that it has started, until it is cancelled."""
    while process is not None:
        now, own = time.monotonic() - mix.started, resident_bytes(process)
        mix.server.append(Reading(now, own))
        mix.tree.append(Reading(now, own + sum(map(resident_bytes, children(process)))))
        await asyncio.sleep(READ_EVERY)


async def _check_idle(mix: Mix, address: str) -> None:
    """No request is left, and all slots are free."""
    async with httpx2.AsyncClient(base_url=address, timeout=IDLE_SECONDS) as client:
        until = time.monotonic() + IDLE_SECONDS
        while True:
            state = (await client.get("/live")).json()
            if not state["waiting"] and not any(state["slots"]):
                return
            if time.monotonic() > until:
                taken = sum(slot is not None for slot in state["slots"])
                mix.faults.append(f"{taken} slots taken and {state['waiting']} waiting when no client is left")
                return
            await asyncio.sleep(0.5)


def faults_of_log(log: IO[bytes]) -> list[str]:
    """Lines of a log that no client should be able to cause."""
    log.seek(0)
    lines = log.read().decode(errors="replace").splitlines()
    # A client may send the word: the level follows date and time.
    found = [f"log: {line}" for line in lines if re.match(r"Traceback|\S+ \S+ ERROR ", line)]
    longest = max(map(len, lines), default=0)
    if longest > LONGEST_LINE:
        found.append(f"log: a line of {longest} characters")
    return found


@contextlib.contextmanager
def started(model: str, options: Sequence[str], log: IO[bytes]) -> Iterator[tuple[str, int]]:
    """The address of ``speccompile serve``, and its process."""
    port = free_port()
    address = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-m", "speccompile", "serve", model, "--port", str(port), *options]
    with running(command, address, log) as process:
        yield address, process.pid


def named(names: Sequence[str]) -> list[Attack]:
    """The attacks with these names, in which ``_`` may stand for a space; all of them for no name."""
    wanted = [name.replace("_", " ") for name in names]
    unknown = set(wanted) - {attack.name for attack in ATTACKS}
    if unknown:
        known = ", ".join(attack.name for attack in ATTACKS)
        raise typer.BadParameter(f"{', '.join(sorted(unknown))}: no such attack; use some of {known}")
    return [attack for attack in ATTACKS if not wanted or attack.name in wanted]


def main(
    model: Annotated[str, typer.Option(help="smollm2, tiny, a local folder or a hub id.")] = "smollm2",
    address: Annotated[
        str | None,
        typer.Option(help="Of a server with that model, such as http://127.0.0.1:8000; else one is started."),
    ] = None,
    process: Annotated[int | None, typer.Option(help="The id of the process of that server, to read memory.")] = None,
    clients: Annotated[int, typer.Option(min=2, help="Honest clients.")] = 16,
    long_share: Annotated[float, typer.Option(min=0.0, max=1.0, help="Of them, those with long prompts.")] = 0.3,
    hostile: Annotated[int, typer.Option(min=0, help="Hostile clients.")] = 8,
    attack: Annotated[list[str] | None, typer.Option(help="Attack by this one alone; may repeat.")] = None,
    slots: Annotated[int, typer.Option(min=1, help="Requests that run at a time, of a server that is started.")] = 16,
    short_words: Annotated[int, typer.Option(min=1, help="Of a short prompt.")] = 20,
    long_words: Annotated[int, typer.Option(min=1, help="Of a long prompt.")] = 1700,
    new_tokens: Annotated[int, typer.Option(min=2, help="Of each answer.")] = 32,
    minutes: Annotated[float, typer.Option(min=0.01)] = 10.0,
    seed: Annotated[int, typer.Option(help="Of everything random here.")] = 0,
    log: Annotated[Path | None, typer.Option(help="Keep the log of a server that is started there.")] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write all figures there.")] = None,
    quick: Annotated[bool, typer.Option(help="A tiny model for seconds, to see that it runs.")] = False,
) -> None:
    """Exits with 1 when the server is not as sound as it should be."""
    attacks, bounds = named(attack or []), Bounds()
    options = ["--max-batch", str(slots), "--max-len", "2048", "--warm"]
    if quick:
        # Its tokens are bytes.
        model, clients, short_words, long_words, new_tokens, minutes = "tiny", 4, 5, 60, 8, 1 / 6
        options = ["--max-batch", "4", "--max-len", "512", "--tiers", "0,3", "--backend", "eager"]
    honest = Load(clients, round(clients * long_share), short_words, long_words, new_tokens, 60 * minutes)
    with session(), contextlib.ExitStack() as stack:
        output: IO[bytes] = stack.enter_context(tempfile.TemporaryFile())
        if log is not None:
            output = stack.enter_context(log.open("w+b"))
        if address is None:
            with task("start the server"):
                address, process = stack.enter_context(started(model, options, output))
        # The first requests build what all need.
        asyncio.run(run_load(address, Load(2, 1, short_words, long_words, new_tokens, 0.1), seed=-1))
        mix = Mix(time.monotonic(), honest.seconds)
        url = httpx2.URL(address)
        with task("serve honest clients beside hostile ones"), probed(url.host, url.port or 80) as probes:
            asyncio.run(run_mix(mix, address, honest, attacks, hostile=hostile, process=process, seed=seed))
        mix.probes = [probe for probe in probes if probe.asked < mix.started + mix.seconds]
        mix.faults += faults_of_log(output)
        console = Console(width=None if sys.stdout.isatty() else 140)
        for table in (attacks_table(mix, attacks), summary_table(mix)):
            console.print(table)
        target, tokenizer = load(model)
        with task("compare texts with transformers' generate"):
            mix.wrong += wrong_texts(target, tokenizer, mix.answers, new_tokens)
    typer.echo(f"wrong texts: {len(mix.wrong)} of {len(mix.answers)}")
    problems = mix.problems(bounds, attacks)
    typer.echo(f"problems, wrong texts included: {len(problems)}")
    for problem in problems[:20]:
        typer.echo(problem, err=True)
    if json_file is not None:
        figures = {"machine": describe(), "model": model, "load": asdict(honest), "hostile": hostile}
        figures |= {"bounds": asdict(bounds), "problems": problems, **asdict(mix)}
        json_file.write_text(json.dumps(figures, indent=1) + "\n")
    raise typer.Exit(1 if problems else 0)


if __name__ == "__main__":
    typer.run(main)

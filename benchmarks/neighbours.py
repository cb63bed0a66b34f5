"""How much longer does a step take while something else runs on the machine?

``python -m benchmarks.neighbours``; see README.md beside this file.
"""

from __future__ import annotations

import contextlib
import json
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table
from transformers import PreTrainedModel

from benchmarks.machine import describe
from benchmarks.steps import PIPED_WIDTH, PROMPT, SHORT, Work, place, prefill, seconds
from speccompile import Speculator, wrap
from speccompile.cli.models import load
from speccompile.cli.session import session
from speccompile.utils.progress import task
from speccompile.utils.transformers_version import CACHE

MAX_LEN = 1024
# Of one kind of work beside one neighbour.
MOST_SECONDS = 5.0
READY = "ready"
_ROOT = Path(__file__).resolve().parents[1]

Neighbour = Callable[[], contextlib.AbstractContextManager[Any]]


def main(
    model: Annotated[str, typer.Option(help="smollm2, tiny, a local folder or a hub id.")] = "smollm2",
    weights: Annotated[str, typer.Option(help="same, int8 or int4.")] = "same",
    draft_len: Annotated[int, typer.Option(min=1, help="Of the wide step.")] = 7,
    repeats: Annotated[int, typer.Option(min=2, help="Steps of each kind, beside each neighbour.")] = 60,
    only: Annotated[str, typer.Option(help="Neighbours by name, separated by commas; empty for all.")] = "",
    quick: Annotated[bool, typer.Option(help="Two of each, to see that it runs.")] = False,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write all figures there.")] = None,
) -> None:
    """Time steps, prompts and transformers' forward beside each neighbour."""
    if quick:
        repeats = 2
    with session(), contextlib.ExitStack() as stack:
        target, _ = load(model)
        spec = stack.enter_context(_wrapped(target, weights, draft_len))
        second = stack.enter_context(_wrapped(target, weights, draft_len))
        works = _works(target, spec, draft_len)
        neighbours = _neighbours(model, weights, second)
        chosen = [name for name in neighbours if not only or name in only.split(",")]
        taken: dict[str, dict[str, list[float]]] = {}
        for name in chosen:
            with task(f"beside {name}"), neighbours[name]():
                taken[name] = _in_turns(works, repeats)
    report = _report(taken)
    console = Console(width=None if sys.stdout.isatty() else PIPED_WIDTH)
    console.print(_table(report))
    if json_file is not None:
        settings = {"model": model, "weights": weights, "draft_len": draft_len, "repeats": repeats}
        json_file.write_text(json.dumps({"machine": describe(), "settings": settings, **report}, indent=1) + "\n")


def _wrapped(target: PreTrainedModel, weights: str, draft_len: int) -> Speculator:
    return wrap(target, "ngram", tiers=(0, draft_len), max_len=MAX_LEN, weights=weights, prefix_reuse=False)


def _works(target: PreTrainedModel, spec: Speculator, draft_len: int) -> dict[str, tuple[Work, int]]:
    """Each with the share of ``repeats`` that it gets: what takes ten times as long runs a tenth as often."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(1, spec.arena.layout.vocab_size, (1, PROMPT), generator=generator)
    return {
        "K=0": (_step(spec, 0), 1),
        f"K={draft_len}": (_step(spec, draft_len), 1),
        f"prompt of {PROMPT}": (prefill(spec, ids), 20),
        "transformers, one token": (_transformers_step(target, ids[:, :SHORT]), 1),
    }


def _step(spec: Speculator, draft_len: int) -> Work:
    tier = spec.engine.tiers[draft_len, 1, "greedy"]

    def run() -> float:
        place(spec, SHORT)
        return seconds(tier.run)

    return run


def _transformers_step(target: PreTrainedModel, ids: torch.Tensor) -> Work:
    with torch.no_grad():
        cache = target(input_ids=ids, use_cache=True)[CACHE]

    @torch.no_grad()
    def step() -> None:
        target(input_ids=ids[:, :1], use_cache=True, **{CACHE: cache})
        cache.crop(-1)

    return lambda: seconds(step)


def _in_turns(works: dict[str, tuple[Work, int]], repeats: int) -> dict[str, list[float]]:
    """Seconds of each. Steps of a kind run in runs of ten, as in decoding; the first of a run is not counted."""
    taken: dict[str, list[float]] = {name: [] for name in works}
    for name, (work, share) in works.items():
        run, started = max(1, min(10, repeats // share)), time.monotonic()
        while len(taken[name]) < max(2, repeats // share) and (
            not taken[name] or time.monotonic() - started < MOST_SECONDS
        ):
            taken[name] += [float(work()) for _ in range(run + 1)][1:]  # type: ignore[arg-type]
    return taken


# --- neighbours ----------------------------------------------------------------------------------


def _neighbours(model: str, weights: str, second: Speculator) -> dict[str, Neighbour]:
    return {
        "nothing": contextlib.nullcontext,
        "one busy loop": lambda: _programs("busy", count=1),
        "two busy loops": lambda: _programs("busy", count=2),
        "another OpenMP program": lambda: _programs("openmp"),
        "a second wrapped model, in a process": lambda: _programs("decode", model, weights),
        "a second wrapped model, in a thread": lambda: _thread(second),
    }


@contextlib.contextmanager
def _programs(what: str, *arguments: str, count: int = 1) -> Iterator[None]:
    command = [sys.executable, "-m", __spec__.name, what, *arguments]
    programs = [subprocess.Popen(command, cwd=_ROOT, stdout=subprocess.PIPE, text=True) for _ in range(count)]
    try:
        for program in programs:
            assert program.stdout is not None
            if program.stdout.readline().strip() != READY:
                raise RuntimeError(f"the neighbour {what!r} ended with {program.wait()}")
        yield
    finally:
        for program in programs:
            program.kill()
            program.wait()


@contextlib.contextmanager
def _thread(spec: Speculator) -> Iterator[None]:
    ends = threading.Event()

    def decode() -> None:
        while not ends.is_set():
            place(spec, SHORT)
            spec.engine.tiers[0, 1, "greedy"].run()

    thread = threading.Thread(target=decode)
    thread.start()
    try:
        yield
    finally:
        ends.set()
        thread.join()


def neighbour(what: str, *arguments: str) -> None:
    """Be one, until killed."""
    if what == "decode":
        model, weights = arguments
        with session():
            target, _ = load(model)
            spec = _wrapped(target, weights, 7)
            step = _step(spec, 0)
            step()
            print(READY, flush=True)
            while True:
                step()
    elif what == "openmp":
        left = right = torch.ones(512, 512)
        print(READY, flush=True)
        while True:
            torch.relu(left + right)
    else:
        print(READY, flush=True)
        while True:
            pass


# --- report --------------------------------------------------------------------------------------


def _report(taken: dict[str, dict[str, list[float]]]) -> dict[str, Any]:
    return {
        "milliseconds": {
            beside: {
                what: {"median": 1e3 * statistics.median(values), "mean": 1e3 * statistics.fmean(values)}
                for what, values in works.items()
            }
            for beside, works in taken.items()
        }
    }


def _table(report: dict[str, Any]) -> Table:
    figures: dict[str, dict[str, dict[str, float]]] = report["milliseconds"]
    table = Table(title="milliseconds, median (mean)", title_justify="left")
    table.add_column("beside")
    works = list(next(iter(figures.values())))
    for what in works:
        table.add_column(what, justify="right")
    for beside, values in figures.items():
        table.add_row(beside, *(f"{values[what]['median']:.1f} ({values[what]['mean']:.1f})" for what in works))
    return table


if __name__ == "__main__":
    if len(sys.argv) > 1 and not sys.argv[1].startswith("-"):
        neighbour(*sys.argv[1:])
    else:
        typer.run(main)

"""Three live rows: what does a step cost in an engine of 4 slots, in one of 32, and on the 32-row executable?

``python -m benchmarks.rows``; see README.md beside this file.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from benchmarks.machine import describe
from benchmarks.prompts import name_of
from benchmarks.serving import fitting_prompts
from speccompile import Speculator, wrap
from speccompile.cli.models import load
from speccompile.cli.session import parse_tiers, session
from speccompile.runtime.request import Request
from speccompile.utils.progress import task

PIPED_WIDTH = 140
WARM_UP_STEPS = 3


def begin(spec: Speculator, draft_len: int, prompts: Sequence[list[int]]) -> list[Request]:
    """Requests with their first token, that run on until they are cancelled."""
    spec.set_tier(draft_len)
    longest = spec.arena.layout.max_len
    requests = [spec.engine.submit(ids, max_new_tokens=longest, eos_token_id=[]) for ids in prompts]
    while not all(request.new_tokens for request in requests):
        spec.engine.step()
    return requests


def rehearse(spec: Speculator, draft_len: int) -> float:
    """Seconds of the executable of most rows over the rows that are live now; everything is then as it was."""
    arena = spec.arena
    tier = spec.engine.tiers[draft_len, arena.layout.max_batch, "greedy"]
    # It may write KV after the text, which is dead there.
    saved = {name: arena[name].clone() for name, tensor in arena.layout.tensors.items() if not tensor.follows_text}
    seconds = _seconds(tier.run)
    for name, tensor in saved.items():
        arena[name].copy_(tensor)
    return seconds


def measure(
    few: Speculator, many: Speculator, draft_len: int, prompts: Sequence[list[int]], steps: int
) -> dict[str, Any]:
    """Median seconds of a step: of ``few``'s engine, of ``many``'s, and of the latter's executable of most rows. They
    take turns, over the same texts at the same place."""
    requests = [request for spec in (few, many) for request in begin(spec, draft_len, prompts)]
    seconds: list[tuple[float, ...]] = []
    for _ in range(WARM_UP_STEPS + steps):
        widest = rehearse(many, draft_len)
        seconds.append((_seconds(few.engine.step), _seconds(many.engine.step), widest))
    rows = [spec.engine.tier.key.rows for spec in (few, many)]
    drafted = {spec.engine.tier.draft_len for spec in (few, many)}
    assert drafted == {draft_len} and not any(request.finished for request in requests), "work was not equal"
    half = len(prompts)
    # An engine reads prompts as fast as it measured itself to be, so that one of them may be some steps ahead.
    pairs = [(a.new_tokens, b.new_tokens) for a, b in zip(requests[:half], requests[half:], strict=True)]
    same = all(a[: len(b)] == b[: len(a)] for a, b in pairs)
    for request in requests:
        request.cancel()
    medians = [statistics.median(column) for column in zip(*seconds[WARM_UP_STEPS:], strict=True)]
    slots = [spec.arena.layout.max_batch for spec in (few, many)]
    return {
        "draft_len": draft_len,
        "live_rows": half,
        "slots": slots,
        "rows_of_step": [*rows, slots[1]],
        "step_seconds": medians,
        "ratios": [median / medians[0] for median in medians],
        "same_texts": same,
    }


def _seconds(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def table(rows: Sequence[dict[str, Any]]) -> Table:
    few, many = rows[0]["slots"]
    table = Table(title=f"a step of {rows[0]['live_rows']} live rows, median", title_justify="left")
    for heading in (
        "K",
        f"engine of {few} slots",
        f"engine of {many} slots",
        f"executable of {many} rows",
        "same texts",
    ):
        table.add_column(heading, justify="right")
    for row in rows:
        cells = [
            f"{seconds * 1e3:.1f} ms on {executable} rows ({ratio:.2f}x)"
            for seconds, executable, ratio in zip(row["step_seconds"], row["rows_of_step"], row["ratios"], strict=True)
        ]
        table.add_row(str(row["draft_len"]), *cells, "yes" if row["same_texts"] else "no")
    return table


def main(
    model: Annotated[str, typer.Option(help="smollm2, tiny, a local folder or a hub id.")] = "smollm2",
    prompts: Annotated[Path | None, typer.Option(help="Spec-Bench's or HumanEval's JSON lines, also .gz.")] = None,
    count: Annotated[int, typer.Option(min=1, help="Live rows.")] = 3,
    slots: Annotated[str, typer.Option(help="Of the smaller and of the larger engine.")] = "4,32",
    tiers: Annotated[str, typer.Option(help="Draft lengths, 0 among them.")] = "0,3",
    steps: Annotated[int, typer.Option(min=1, help="Of each, for each draft length.")] = 30,
    backend: Annotated[str, typer.Option(help="auto, eager or inductor.")] = "auto",
    max_len: Annotated[int, typer.Option(min=2, help="Most tokens of a text; longer prompts are left out.")] = 1024,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write all figures there.")] = None,
) -> None:
    """Compare a step of few live rows in a small and in a large engine."""
    with session():
        draft_lens = parse_tiers(tiers)
        few_slots, many_slots = (int(item) for item in slots.split(","))
        target, tokenizer = load(model)
        room = (steps + WARM_UP_STEPS + count + 1) * (max(draft_lens) + 1)
        ids = [ids for _, ids in fitting_prompts(tokenizer, prompts, count, max_len - room)]
        # A drafter that runs layers drafts in every step, so that both engines do the same work.
        wrapped = [
            wrap(target, "early_exit", tiers=draft_lens, max_batch=number, max_len=max_len, backend=backend)
            for number in (few_slots, many_slots)
        ]
        with wrapped[0] as few, wrapped[1] as many, task("step by step"):
            rows = [measure(few, many, draft_len, ids, steps) for draft_len in draft_lens]
        Console(width=None if sys.stdout.isatty() else PIPED_WIDTH).print(table(rows))
        if json_file is not None:
            settings = {"model": model, "prompts": name_of(prompts), "steps": steps, "max_len": max_len}
            report = {"machine": describe(), "settings": settings, "rows": rows}
            json_file.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    typer.run(main)

"""How long do running requests wait for their next token while a long prompt is read?

``python -m benchmarks.stall``; see README.md beside this file.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Sequence
from itertools import chain, cycle, islice
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from benchmarks.machine import describe
from benchmarks.prompts import name_of
from benchmarks.serving import fitting_prompts, percentile, unlike
from speccompile import Speculator, wrap
from speccompile.cli.models import load
from speccompile.cli.session import parse_tiers, session
from speccompile.runtime.prefill import PrefillBudget
from speccompile.utils.progress import task

PIPED_WIDTH = 160
# Room for what the running requests say meanwhile.
RUNNING_TOKENS = 1024


def measure(
    spec: Speculator, running: Sequence[list[int]], long: list[int], budget: int | None, steps: int
) -> dict[str, Any]:
    """``running`` have stepped ``steps`` times when ``long`` arrives. Seconds between their steps, before and while it
    is read, and until it has its first token."""
    engine = spec.engine
    engine.prompts.budget = PrefillBudget(list(spec.prefill), budget, fixed=False)
    # What chunks cost is known in an engine that has been running for a while.
    engine.submit(unlike([long], engine.arena.layout.vocab_size), max_new_tokens=2).result()
    room = engine.arena.layout.max_len
    requests = [engine.submit(ids, max_new_tokens=room, eos_token_id=[]) for ids in running]
    while not all(request.new_tokens for request in requests):
        engine.step()
    before = [_step_seconds(spec) for _ in range(steps)]
    late = engine.submit(long, max_new_tokens=2, eos_token_id=[])
    while_read = []
    while not late.new_tokens:
        while_read.append(_step_seconds(spec))
    ended = any(request.finished for request in requests)
    for request in [*requests, late]:
        request.cancel()
    assert not ended, "a running request came to its end first"
    usual = statistics.median(before)
    return {
        "budget": budget,
        "running": len(running),
        "prompt_tokens": len(long),
        "usual_step_seconds": usual,
        "p99_before_seconds": percentile(before, 99),
        "longest_before_seconds": max(before),
        "median_gap_seconds": statistics.median(while_read),
        "p99_gap_seconds": percentile(while_read, 99),
        "longest_gap_seconds": max(while_read),
        "ratio": max(while_read) / usual,
        "steps_while_read": len(while_read),
        "first_token_seconds": late.timings.first_token,
    }


def _step_seconds(spec: Speculator) -> float:
    started = time.perf_counter()
    rows = spec.engine.step()
    assert rows
    return time.perf_counter() - started


def repeated(prompts: Sequence[list[int]], length: int) -> list[int]:
    """A prompt of ``length`` tokens, made of ``prompts``."""
    return list(islice(cycle(chain.from_iterable(prompts)), length))


def table(rows: Sequence[dict[str, Any]]) -> Table:
    first = rows[0]
    title = f"{first['running']} running requests, and a prompt of {first['prompt_tokens']} tokens arrives"
    table = Table(title=title, title_justify="left")
    table.add_column("mode")
    headings = (
        "tokens a step",
        "usual step",
        "p99, longest",
        "meanwhile: median",
        "p99",
        "longest",
        "steps",
        "first token",
    )
    for heading in headings:
        table.add_column(heading, justify="right")
    for row in rows:
        usual = row["usual_step_seconds"]
        meanwhile = [row[f"{name}_gap_seconds"] for name in ("median", "p99", "longest")]
        table.add_row(
            row["mode"],
            "measured" if row["budget"] is None else str(row["budget"]),
            f"{usual * 1e3:.0f} ms",
            f"{row['p99_before_seconds'] * 1e3:.0f}, {row['longest_before_seconds'] * 1e3:.0f} ms",
            *(f"{seconds * 1e3:.0f} ms ({seconds / usual:.1f}x)" for seconds in meanwhile),
            str(row["steps_while_read"]),
            f"{row['first_token_seconds']:.2f} s",
        )
    return table


def main(
    model: Annotated[str, typer.Option(help="smollm2, tiny, a local folder or a hub id.")] = "smollm2",
    prompts: Annotated[Path | None, typer.Option(help="Spec-Bench's or HumanEval's JSON lines, also .gz.")] = None,
    count: Annotated[int, typer.Option(min=1, help="Running requests.")] = 4,
    long: Annotated[int, typer.Option(min=1, help="Tokens of the prompt that arrives.")] = 1500,
    steps: Annotated[int, typer.Option(min=1, help="Before it arrives.")] = 100,
    modes: Annotated[str, typer.Option(help="How to draft.")] = "none,ngram",
    tiers: Annotated[str, typer.Option(help="Draft lengths, 0 among them; mode none has 0 alone.")] = "0,1,3,7",
    budget: Annotated[int, typer.Option(min=1, help="prefill_budget to compare the measured one with.")] = 512,
    backend: Annotated[str, typer.Option(help="auto, eager or inductor.")] = "auto",
    json_file: Annotated[Path | None, typer.Option("--json", help="Write all figures there.")] = None,
) -> None:
    """Measure what a long prompt costs those that run."""
    with session():
        draft_lens = parse_tiers(tiers)
        target, tokenizer = load(model)
        running = [ids for _, ids in fitting_prompts(tokenizer, prompts, count, long)]
        arriving = repeated(running, long)
        rows = []
        for mode in modes.split(","):
            with (
                wrap(
                    target,
                    mode,
                    tiers=(0,) if mode == "none" else draft_lens,
                    max_batch=len(running) + 1,
                    max_len=long + RUNNING_TOKENS,
                    backend=backend,
                    # The same prompts come again.
                    prefix_reuse=False,
                ) as spec,
                task(f"measure mode {mode}"),
            ):
                for limit in (None, budget):
                    rows.append({"mode": mode} | measure(spec, running, arriving, limit, steps))
        Console(width=None if sys.stdout.isatty() else PIPED_WIDTH).print(table(rows))
        if json_file is not None:
            settings = {"model": model, "prompts": name_of(prompts), "steps": steps, "tiers": draft_lens}
            report = {"machine": describe(), "settings": settings, "rows": rows}
            json_file.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    typer.run(main)

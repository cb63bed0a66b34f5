"""The parts of a recorded step on a CPU: each kernel call is timed in its place, at several contexts.

``python -m benchmarks.step_parts``; see README.md beside this file.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, cast, get_args

import torch
import typer
from rich.console import Console
from rich.table import Table

from benchmarks.machine import describe
from benchmarks.steps import PIPED_WIDTH, place, seconds
from speccompile import Speculator, wrap
from speccompile.cli.models import load
from speccompile.cli.session import parse_tiers, session
from speccompile.graph.keys import Kind
from speccompile.lowering.recorded_step import RecordedStep
from speccompile.utils.progress import task

#: Linears of a layer, by the number of those since attention; the first is that of the layer itself.
LINEARS = ("attention output", "gate and up", "down", "queries, keys, values")
PARTS = {
    "attention": "attention",
    "embedding": "embedding",
    "choose": "choosing",
    "accept_commit_": "commit",
    "step_inputs": "inputs",
    "match_ngram": "proposing",
    "store_drafts_": "proposing",
}


def part_of(name: str, since: int) -> str:
    """The part of a step that a call of ``name`` belongs to; ``since``: linears since the attention before it."""
    if "linear" in name:
        return "lm_head" if since < 0 else LINEARS[min(since, len(LINEARS) - 1)]
    return next((part for op, part in PARTS.items() if op in name), name)


def parts_of(calls: Sequence[tuple[str, float]]) -> dict[str, float]:
    """Milliseconds by part."""
    last = max(index for index, (name, _) in enumerate(calls) if "linear" in name)
    found: dict[str, float] = {}
    since = len(LINEARS) - 1
    for index, (name, spent) in enumerate(calls):
        part = part_of(name, -1 if index == last else since)
        if "linear" in name:
            since += 1
        elif "attention" in name:
            since = 0
        found[part] = found.get(part, 0.0) + 1e3 * spent
    return found


def measure(spec: Speculator, draft_len: int, context: int, repeats: int, kind: Kind = "greedy") -> dict[str, float]:
    """Medians of the parts, and of a whole step (``step``), in milliseconds."""
    tier = spec.engine.tiers[draft_len, 1, kind]
    if not isinstance(tier.executable, RecordedStep):
        raise typer.BadParameter("steps of this model are not recorded; see spec.explain()")
    taken: dict[str, list[float]] = {}
    for _ in range(repeats + 2):
        place(spec, context)
        taken.setdefault("step", []).append(1e3 * seconds(tier.run))
        place(spec, context)
        for part, spent in parts_of(tier.executable.timed()).items():
            taken.setdefault(part, []).append(spent)
    return {part: statistics.median(values[2:]) for part, values in taken.items()}


def main(
    model: Annotated[str, typer.Option(help="smollm2, tiny, a local folder or a hub id.")] = "smollm2",
    mode: Annotated[str, typer.Option(help="How to draft.")] = "ngram",
    tiers: Annotated[str, typer.Option(help="Draft lengths, 0 among them.")] = "0,3,7",
    weights: Annotated[str, typer.Option(help="same, int8 or int4.")] = "int4",
    kind: Annotated[str, typer.Option(help="greedy, or sampled, whose rows use no option.")] = "greedy",
    contexts: Annotated[str, typer.Option(help="Tokens before the step.")] = "100,500,2000",
    repeats: Annotated[int, typer.Option(min=1, help="Of each.")] = 30,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write all figures there.")] = None,
) -> None:
    """Time the kernel calls of recorded steps."""
    if kind not in get_args(Kind):
        raise typer.BadParameter(f"kind is one of {', '.join(get_args(Kind))}")
    lengths = [int(text) for text in contexts.split(",")]
    found: dict[str, Any] = {}
    with session():
        draft_lens = parse_tiers(tiers)
        target, _ = load(model)
        # Longest text, the step's own tokens included.
        longest = max(lengths) + 16
        options: dict[str, Any] = {"tiers": draft_lens, "weights": weights, "max_len": longest, "prefix_reuse": False}
        with wrap(target, mode, sampling=kind != "greedy", **options) as spec:
            spec.generate(torch.ones((1, 4), dtype=torch.int64), max_new_tokens=8)
            with task("step by step"):
                for context in lengths:
                    for draft_len in draft_lens:
                        found[f"K={draft_len}, context {context}"] = measure(
                            spec, draft_len, context, repeats, cast(Kind, kind)
                        )
    table = Table(title="milliseconds, medians", title_justify="left")
    table.add_column("")
    for step in found:
        table.add_column(step, justify="right")
    for part in dict.fromkeys(part for parts in found.values() for part in parts):
        table.add_row(part, *(f"{parts.get(part, 0.0):.2f}" for parts in found.values()))
    Console(width=None if sys.stdout.isatty() else PIPED_WIDTH).print(table)
    if json_file is not None:
        settings = {"model": model, "mode": mode, "weights": weights, "kind": kind, "repeats": repeats}
        json_file.write_text(json.dumps({"machine": describe(), "settings": settings, "parts": found}, indent=1) + "\n")


if __name__ == "__main__":
    typer.run(main)

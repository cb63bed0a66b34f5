"""What does a step cost whose rows have adapters: none, all the same one, each its own?

``python -m benchmarks.adapters``; see README.md beside this file.
"""

from __future__ import annotations

import json
import statistics
import sys
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table

from benchmarks.machine import describe
from benchmarks.steps import PIPED_WIDTH, Work, interleaved, seconds
from speccompile import Adapters, Speculator, wrap
from speccompile.adapters.buffers import OF_SLOT, AdapterBuffers, LoraPair
from speccompile.adapters.options import ALL_LINEAR
from speccompile.cli.models import load
from speccompile.cli.session import parse_tiers, session
from speccompile.utils.progress import task

CONTEXT, MAX_LEN = 200, 512
#: What the rows have.
WITHOUT, NONE, ONE, EACH = "wrapped without adapters", "no row has one", "all have one", "each has its own"


def random_adapter(buffers: AdapterBuffers, rank: int, seed: int) -> dict[str, LoraPair]:
    """An adapter of all linears that have room."""
    generator = torch.Generator().manual_seed(seed)
    return {
        linear.path: LoraPair(
            torch.randn((rank, linear.depth), generator=generator) / linear.depth,
            torch.randn((linear.features, rank), generator=generator) / rank,
            1.0,
        )
        for linear in buffers.linears
    }


def step(spec: Speculator, draft_len: int, rows: int, adapters: list[int] | None) -> Work:
    """A step of that tier over so many rows, the faster of two."""
    tier, arena = spec.engine.tiers[draft_len, rows, "greedy"], spec.arena

    def prepare_and_run() -> float:
        arena["length"].fill_(CONTEXT)
        arena["limit"].fill_(MAX_LEN)
        arena["alive"].fill_(True)
        arena["slots"][:rows] = torch.arange(rows)
        if adapters is not None:
            arena[OF_SLOT][:rows] = torch.tensor(adapters)
        return seconds(tier.run)

    return lambda: min(prepare_and_run() for _ in range(2))


def compare(
    plain: Speculator, adapted: Speculator, draft_lens: tuple[int, ...], row_counts: list[int], repeats: int
) -> list[dict[str, Any]]:
    lines = []
    for rows in row_counts:
        for draft_len in draft_lens:
            works = {
                WITHOUT: step(plain, draft_len, rows, None),
                NONE: step(adapted, draft_len, rows, [-1] * rows),
                ONE: step(adapted, draft_len, rows, [0] * rows),
                EACH: step(adapted, draft_len, rows, list(range(rows))),
            }
            for name, taken in interleaved(works, repeats).items():
                line = {"rows": rows, "K": draft_len, "adapters": name}
                lines.append(line | {"median_ms": 1e3 * statistics.median(taken), "least_ms": 1e3 * min(taken)})
    return lines


def table(lines: list[dict[str, Any]]) -> Table:
    made = Table(title="milliseconds, interleaved, and relative to a wrap without adapters", title_justify="left")
    for heading in ("rows", "K", "adapters", "median ms", "least ms", "median", "least"):
        made.add_column(heading, justify="left" if heading == "adapters" else "right")
    for line in lines:
        # The first line of the same rows and K.
        base = next(one for one in lines if (one["rows"], one["K"]) == (line["rows"], line["K"]))
        ratios = [f"{line[name] / base[name]:.2f}x" for name in ("median_ms", "least_ms")]
        milliseconds = [f"{line[name]:.1f}" for name in ("median_ms", "least_ms")]
        made.add_row(str(line["rows"]), str(line["K"]), line["adapters"], *milliseconds, *ratios)
    return made


def main(
    model: Annotated[str, typer.Option(help="smollm2, tiny, a local folder or a hub id.")] = "smollm2",
    rank: Annotated[int, typer.Option(min=1, help="Of each adapter.")] = 16,
    modules: Annotated[str, typer.Option(help="Linears with adapters, by commas.")] = ALL_LINEAR,
    rows: Annotated[str, typer.Option(help="Rows of a step, by commas.")] = "1,4,8",
    tiers: Annotated[str, typer.Option(help="Draft lengths, 0 among them.")] = "0,7",
    weights: Annotated[str, typer.Option(help="same, int8 or int4.")] = "same",
    model_dtype: Annotated[
        str | None, typer.Option(help="Converts the model to it: bfloat16, float16, float32.")
    ] = None,
    dtype: Annotated[str | None, typer.Option(help="Of the adapters; by default the model's.")] = None,
    repeats: Annotated[int, typer.Option(min=1, help="Of each.")] = 20,
    backend: Annotated[str, typer.Option(help="auto, eager or inductor.")] = "auto",
    quick: Annotated[bool, typer.Option(help="Two of each, to see that it runs.")] = False,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write all figures there.")] = None,
) -> None:
    """Time single steps, in turns."""
    if quick:
        repeats = 2
    with session():
        row_counts, draft_lens = [int(count) for count in rows.split(",")], parse_tiers(tiers)
        target, _ = load(model)
        if model_dtype is not None:
            target.to(getattr(torch, model_dtype))
        names = modules if modules == ALL_LINEAR else tuple(modules.split(","))
        room = Adapters(max(row_counts), max_rank=rank, modules=names, dtype=dtype)
        options: dict[str, Any] = {
            "tiers": draft_lens,
            "backend": backend,
            "weights": weights,
            "max_len": MAX_LEN,
            "max_batch": max(row_counts),
        }
        with wrap(target, "ngram", **options) as plain, wrap(target, "ngram", adapters=room, **options) as adapted:
            buffers = adapted.engine.adapters.buffers
            assert buffers is not None
            for number in range(room.count):
                adapted.engine.adapters.add(f"adapter-{number}", random_adapter(buffers, rank, number))
            with task("step by step"):
                lines = compare(plain, adapted, draft_lens, row_counts, repeats)
            about = next(line for line in adapted.explain().splitlines() if line.startswith("adapters"))
        console = Console(width=None if sys.stdout.isatty() else PIPED_WIDTH)
        console.print(table(lines))
        console.print(about.partition("; loaded")[0])
        if json_file is not None:
            settings = {"model": model, "rank": rank, "modules": modules, "weights": weights, "dtype": dtype}
            settings["model_dtype"] = str(target.dtype)
            settings |= {"context": CONTEXT, "repeats": repeats}
            report = {"machine": describe(), "settings": settings, "lines": lines}
            json_file.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    typer.run(main)

"""``python -m benchmarks.gpu.group NAME``: the parts of one group, in a process of their own."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console

from benchmarks.gpu.budget import Budget, Figures, measure
from benchmarks.gpu.machine import describe
from benchmarks.gpu.plan import GROUPS
from benchmarks.gpu.report import tables
from benchmarks.gpu.results import Results
from benchmarks.gpu.settings import FULL, REHEARSAL

PIPED_WIDTH = 120


def main(
    name: Annotated[str, typer.Argument(help=f"One of {', '.join(group.name for group in GROUPS)}.")],
    output: Annotated[Path, typer.Option(help="The folder of results.json.")],
    until: Annotated[float, typer.Option(help="Seconds since 1970 at which all must be over.")],
    rehearse: Annotated[bool, typer.Option("--rehearse", help="Use a tiny model on the CPU.")] = False,
    only: Annotated[str, typer.Option(help="Leave out parts whose names do not contain this.")] = "",
) -> None:
    """Measure the parts of one group. Exits with 1 if a part failed."""
    group = {group.name: group for group in GROUPS}.get(name)
    if group is None:
        raise typer.BadParameter(f"no group is named {name!r}", param_hint="NAME")
    device = torch.device("cpu" if rehearse else "cuda", None if rehearse else 0)
    settings = REHEARSAL if rehearse else FULL
    results = Results(output)
    results.add("machine", describe(device))
    results.add("settings", settings.as_json())

    def save(measured: dict[str, Figures]) -> None:
        last = next(reversed(measured))
        typer.echo(f"{last}: {measured[last]['seconds']:.1f} s", err=True)
        results.add("parts", {last: measured[last]})

    parts = [part for part in group.parts(settings, device) if only in part.name]
    measured = measure(parts, Budget(until - time.time()), save)
    console = Console(width=None if sys.stdout.isatty() else PIPED_WIDTH)
    for table in tables(measured):
        console.print(table)
    if any("failed" in figures for figures in measured.values()):
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)

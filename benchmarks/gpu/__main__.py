"""``python -m benchmarks.gpu``: all of it within a budget of seconds, as tables and as JSON."""

from __future__ import annotations

import json
import re
import sys
import time
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console

from benchmarks.gpu.budget import Budget, Figures, measure
from benchmarks.gpu.machine import describe, device_name
from benchmarks.gpu.plan import FULL, SMOKE, parts
from benchmarks.gpu.report import tables

PIPED_WIDTH = 120
RESULTS = Path(__file__).resolve().parents[1] / "results"


def main(
    smoke: Annotated[bool, typer.Option("--smoke", help="A tiny model on the CPU: whether all of this runs.")] = False,
    seconds: Annotated[float, typer.Option(help="For all parts together.")] = 480.0,
    until: Annotated[float | None, typer.Option(help="Seconds since 1970 at which all has to be over.")] = None,
    only: Annotated[str, typer.Option(help="Leave out parts whose names do not contain this.")] = "",
    json_file: Annotated[Path | None, typer.Option("--json", help="Write all figures there.")] = None,
) -> None:
    """Measure steps, swaps, memory and whole loops on a GPU."""
    if not smoke and not torch.cuda.is_available():
        typer.echo("no CUDA GPU was found: nothing to measure; --smoke runs everything on the CPU", err=True)
        raise typer.Exit(2)
    device = torch.device("cpu" if smoke else "cuda", None if smoke else 0)
    settings = SMOKE if smoke else FULL
    name = re.sub(r"[^a-z0-9]+", "-", device_name(device).lower()).strip("-")
    if json_file is None and not smoke:
        json_file = RESULTS / f"{name}-gpu.json"
    report: dict[str, Any] = {"machine": describe(device), "settings": settings.as_json(), "parts": {}}

    def save(measured: dict[str, Figures]) -> None:
        report["parts"] = measured
        last = next(reversed(measured))
        typer.echo(f"{last}: {measured[last]['seconds']:.1f} s", err=True)
        if json_file is not None:
            json_file.write_text(json.dumps(report, indent=1) + "\n")

    left = seconds if until is None else min(seconds, until - time.time())
    chosen = [part for part in parts(settings, device) if only in part.name]
    measured = measure(chosen, Budget(left), save)
    console = Console(width=None if sys.stdout.isatty() else PIPED_WIDTH)
    for table in tables(measured):
        console.print(table)
    console.print(json.dumps(report["machine"]), soft_wrap=True, highlight=False)


if __name__ == "__main__":
    typer.run(main)

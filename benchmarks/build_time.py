"""How long a wrap takes, cold and warm, beside one ``torch.compile`` of the whole model.

``python -m benchmarks.build_time``; see README.md beside this file.
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from benchmarks import isolated
from benchmarks.machine import describe
from speccompile.cli.session import session
from speccompile.pretrained import fetch_smollm2
from speccompile.utils.model_names import SMOLLM2
from speccompile.utils.progress import task

COLD, KERNELS, WARM = "cold", "cold, own C++ ops built before", "warm"
COMPILED, COMPILED_WARM = "torch.compile, cold", "torch.compile, warm"
_PIPED_WIDTH = 120


def measure(model: str, arguments: list[str], max_len: int, rounds: int) -> dict[str, dict[str, Any]]:
    """The fastest of ``rounds`` of each, and the seconds of all: what slows a build down has nothing to do with it."""
    measured = [_round(model, arguments, max_len) for _ in range(rounds)]
    return {
        name: min((one[name] for one in measured), key=lambda run: float(run["seconds"]))
        | {"rounds": [one[name]["seconds"] for one in measured]}
        for name in measured[0]
    }


def _round(model: str, arguments: list[str], max_len: int) -> dict[str, dict[str, Any]]:
    """Each in its own process; ``cold`` ones start from empty folders, one right after the other."""
    measured: dict[str, dict[str, Any]] = {}
    compiled_options = ["--max-len", str(max_len)]
    with tempfile.TemporaryDirectory(prefix="speccompile-build-") as folder:

        def run(what: str, name: str, options: list[str]) -> dict[str, Any]:
            with task(f"measure {what} in {name}"):
                return isolated.run(what, model, options, isolated.caches(Path(folder, name)))

        measured[COLD] = run(isolated.SPECULATOR, "first", arguments)
        measured[COMPILED] = run(isolated.COMPILED_FORWARD, "compiled", compiled_options)
        measured[WARM] = run(isolated.SPECULATOR, "first", arguments)
        measured[COMPILED_WARM] = run(isolated.COMPILED_FORWARD, "compiled", compiled_options)
        # Other models, tiers and sizes need no other ops, so this is what every later cold build takes.
        built, seeded = (Path(isolated.caches(Path(folder, name))["SPECCOMPILE_CACHE"]) for name in ("first", "second"))
        if Path(built, "cpu-ops").is_dir():
            shutil.copytree(Path(built, "cpu-ops"), Path(seeded, "cpu-ops"))
            measured[KERNELS] = run(isolated.SPECULATOR, "second", arguments)
    return measured


def claims(measured: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """``of`` takes at most ``most`` times as long as ``to``."""
    wanted = [(COLD, COMPILED, 0.6), (KERNELS, COMPILED, 0.6), (WARM, COLD, 0.25), (WARM, KERNELS, 0.25)]
    return [
        {"claim": f"{of} / {to}", "ratio": measured[of]["seconds"] / measured[to]["seconds"], "wanted": most}
        for of, to, most in wanted
        if of in measured
    ]


def tables(measured: dict[str, dict[str, Any]]) -> list[Table]:
    times = Table(title="build, each in its own process, the fastest of all rounds", title_justify="left")
    for heading in ("", "seconds", "of these"):
        times.add_column(heading)
    for name, one in measured.items():
        parts = ", ".join(f"{part} {seconds:.1f}" for part, seconds in one["parts"].items())
        times.add_row(name, f"{one['seconds']:.1f}", parts)
    ratios = Table(title="ratios", title_justify="left")
    for heading in ("", "measured", "wanted at most", ""):
        ratios.add_column(heading)
    for row in claims(measured):
        met = "yes" if row["ratio"] <= row["wanted"] else "no"
        ratios.add_row(row["claim"], f"{row['ratio']:.2f}x", f"{row['wanted']:.2f}x", met)
    return [times, ratios]


def main(
    model: Annotated[str, typer.Option(help="smollm2, tiny or a local folder.")] = SMOLLM2,
    tiers: Annotated[str, typer.Option(help="Draft lengths, 0 among them.")] = "0,1,3,7,15",
    max_len: Annotated[int, typer.Option(min=2, help="Most tokens of a text.")] = 2048,
    backend: Annotated[str, typer.Option(help="auto, eager or inductor.")] = "auto",
    rounds: Annotated[int, typer.Option(min=1, help="Of each, in turns.")] = 2,
    quick: Annotated[bool, typer.Option(help="The tiny model: to see that it runs.")] = False,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write all figures there.")] = None,
) -> None:
    """Time builds with empty and with filled caches."""
    if quick:
        model, tiers, max_len, rounds = "tiny", "0,1", 64, 1
    with session():
        # Under its name the model would be fetched again, since the caches are fresh.
        path = str(fetch_smollm2()) if model == SMOLLM2 else model
        arguments = ["--tiers", tiers, "--max-len", str(max_len), "--backend", backend]
        measured = measure(path, arguments, max_len, rounds)
        console = Console(width=None if sys.stdout.isatty() else _PIPED_WIDTH)
        for table in tables(measured):
            console.print(table)
        if json_file is not None:
            settings = {"model": model, "tiers": tiers, "max_len": max_len, "backend": backend, "rounds": rounds}
            report = {"machine": describe(), "settings": settings, "builds": measured, "claims": claims(measured)}
            json_file.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    typer.run(main)

"""``python -m benchmarks.without_gpu.launches``: the kernels that a step on CUDA starts, by model and kind of step."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import typer

from benchmarks.without_gpu.counting import TIERS, VARIANTS, Launches, count
from benchmarks.without_gpu.models import MODELS

#: The committed table, whose smallest model ``tests/lowering/cuda/test_cuda_launches.py`` counts.
PAGE = Path(__file__).parents[2] / "docs" / "architecture" / "cuda_launches.md"
HEADER = ("model", "layers", "a layer", *(variant.name for variant in VARIANTS))
NONE = "none"
_TABLE = re.compile(r"^\| model .*?(?=^\s*$|\Z)", re.MULTILINE | re.DOTALL)

Row = dict[str, str]


def row_of(name: str, counts: Mapping[str, Mapping[int, Launches] | str]) -> Row:
    """A line of the table, by column; ``497 / 510`` are the launches at K=0 and K=7."""
    row = {"model": name, "layers": "", "a layer": ""}
    for variant, found in counts.items():
        if isinstance(found, str) or not found:
            row[variant] = NONE
            continue
        row[variant] = " / ".join(str(found[draft_len].total) for draft_len in TIERS)
        if variant == "greedy":
            row["layers"], row["a layer"] = str(found[0].layers), f"{found[0].layer:g}"
    return row


def read_rows(page: str) -> dict[str, Row]:
    """The lines of the page's table, by model."""
    _, _, *lines = _TABLE.search(page)[0].splitlines()  # type: ignore[index]
    rows = [dict(zip(HEADER, re.split(r"\s*\|\s*", line.strip("| \n")), strict=True)) for line in lines]
    return {row["model"]: row for row in rows}


def with_rows(page: str, rows: Mapping[str, Row]) -> str:
    """The page with these lines in the place of those of the same models."""
    known = read_rows(page) | dict(rows)
    lines = [HEADER, ("---",) * len(HEADER)]
    lines += [tuple(known[model.name].values()) for model in MODELS if model.name in known]
    table = "".join(f"| {' | '.join(line)} |\n" for line in lines)
    return _TABLE.sub(lambda _: table, page)


def main(
    only: Annotated[str, typer.Option(help="Leave out models whose names do not contain this.")] = "",
    write: Annotated[bool, typer.Option("--write", help=f"Put the figures into {PAGE.name}.")] = False,
    check: Annotated[bool, typer.Option("--check", help=f"Exit with 1 if {PAGE.name} has other figures.")] = False,
) -> None:
    """Count the launches of a step at K=0 and K=7, of one row. A model takes about a minute."""
    rows = {}
    typer.echo(" | ".join(HEADER))
    for model in MODELS:
        if only.lower() not in model.name.lower():
            continue
        counts = count(model)
        rows[model.name] = row_of(model.name, counts)
        typer.echo(" | ".join(rows[model.name].values()))
        for name, found in counts.items():
            if isinstance(found, str):
                typer.echo(f"    {name}: {found}", err=True)
    known = read_rows(PAGE.read_text())
    different = [name for name, row in rows.items() if row != known.get(name)]
    if check and different:
        typer.echo(f"other figures than {PAGE.name}: {', '.join(different)}", err=True)
        raise typer.Exit(1)
    if write:
        PAGE.write_text(with_rows(PAGE.read_text(), rows))


if __name__ == "__main__":
    typer.run(main)

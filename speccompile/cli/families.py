"""``speccompile families``: list which model families of transformers speculate, and reasons for the others."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import tempfile
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import torch
import transformers
import typer
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table

from speccompile.cli.devices import choose_device
from speccompile.cli.session import session
from speccompile.errors import CannotBeTiny, InvalidOption, UnsupportedModel
from speccompile.lowering.backends import Eager, choose_backend
from speccompile.ops.cpu.library import LIBRARIES, cpu_ops, missing_tools
from speccompile.tools.families.family import Family, causal_lm_families, find_families
from speccompile.tools.families.survey import FamilyRow, Verdict, survey
from speccompile.utils.progress import listening

# Width for output that is not a terminal: a reason fits beside the names.
_WIDTH = 120

_STYLES = {Verdict.EXACT: "green", Verdict.WRONG: "bold red", Verdict.BROKEN: "bold red"}


def run(names: Sequence[str] | None, backend: str, device: str, only: str | None, json_path: Path | None) -> None:
    """See ``speccompile families --help``."""
    with session():
        families = find_families(dict.fromkeys(names)) if names else causal_lm_families()
        chosen = choose_device(device, backend)
        choose_backend(backend, chosen)
        rows: list[FamilyRow] = []
        _write(json_path, rows)
        with _captures_apart(backend):
            for row in _survey(families, backend, chosen):
                rows.append(row)
                _write(json_path, rows)
        console = Console()
        if not console.is_terminal:
            console.width = max(console.width, _WIDTH)
        console.print(_table([row for row in rows if only in (None, row.verdict)]))
        console.print(_summary(rows), highlight=False)
        if any(row.verdict in (Verdict.WRONG, Verdict.BROKEN) for row in rows):
            raise typer.Exit(1)


def _write(path: Path | None, rows: Sequence[FamilyRow]) -> None:
    """Write the rows so far. An interrupted survey, which lasts minutes, then loses nothing."""
    if path is None:
        return
    try:
        path.write_text(json.dumps([dataclasses.asdict(row) for row in rows], indent=2) + "\n")
    except OSError as error:
        raise InvalidOption(
            where="the command line", name="--json", value=str(path), reason=f"it cannot be written ({error.strerror})"
        ) from error


@contextlib.contextmanager
def _captures_apart(backend: str) -> Iterator[None]:
    """Store captures in a temporary folder, since those of tiny models are never used again."""
    before = os.environ.get("SPECCOMPILE_CACHE")
    if backend != Eager.name and missing_tools() is None:
        # Libraries are used again later. They must not be built in the temporary folder.
        for library in LIBRARIES:
            cpu_ops(library)
    with tempfile.TemporaryDirectory(prefix="speccompile-families-") as folder:
        os.environ["SPECCOMPILE_CACHE"] = folder
        try:
            yield
        finally:
            if before is None:
                del os.environ["SPECCOMPILE_CACHE"]
            else:
                os.environ["SPECCOMPILE_CACHE"] = before


def _survey(families: Sequence[Family], backend: str, device: torch.device) -> Iterator[FamilyRow]:
    """Rows, one per family. Each is also printed as a line on stderr when it is done."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        bar = progress.add_task("", total=len(families))
        for family in families:
            report = partial(_describe, progress, bar, family.name)
            report("create a tiny model", True)
            with listening(report):
                row = survey(family, backend=backend, device=device)
            progress.advance(bar)
            console.print(_line(row), markup=False, highlight=False, soft_wrap=True)
            yield row


def _describe(progress: Progress, bar: TaskID, name: str, description: str, begins: bool) -> None:
    progress.update(bar, description=f"{name}: {description}" if begins else name)


def _line(row: FamilyRow) -> str:
    details = [f"{row.seconds:.1f} s"]
    if row.acceptance_length is not None:
        details.insert(0, f"acceptance length {row.acceptance_length:.2f}")
    return f"{row.family}: {row.verdict}, {', '.join(details)}"


def _table(rows: Sequence[FamilyRow]) -> Table:
    title = f"Families of transformers {transformers.__version__}, torch {torch.__version__}"
    table = Table(
        title=title, title_justify="left", box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0)
    )
    table.add_column("family", overflow="fold", max_width=16)
    table.add_column("model class", overflow="fold", max_width=20)
    table.add_column("route")
    table.add_column("verdict", no_wrap=True)
    table.add_column("acceptance\nlength", justify="right")
    table.add_column("seconds", justify="right")
    table.add_column("reason", overflow="fold", ratio=1)
    for row in rows:
        table.add_row(
            row.family,
            row.model_class,
            row.route or "-",
            row.verdict,
            "-" if row.acceptance_length is None else f"{row.acceptance_length:.2f}",
            f"{row.seconds:.1f}",
            escape(_reason(row)),
            style=_STYLES.get(row.verdict),
        )
    return table


def _reason(row: FamilyRow) -> str:
    """Reason of a row, without what other columns show."""
    for error in (UnsupportedModel, CannotBeTiny):
        start = error.template.partition("{reason}")[0].format(model=row.model_class, family=row.family)
        if row.reason.startswith(start):
            return row.reason.removeprefix(start)
    return row.reason


def _summary(rows: Sequence[FamilyRow]) -> str:
    counts = ", ".join(f"{sum(row.verdict == verdict for row in rows)} {verdict}" for verdict in Verdict)
    families = "1 family" if len(rows) == 1 else f"{len(rows)} families"
    return f"{families} in {sum(row.seconds for row in rows):.0f} s: {counts}"

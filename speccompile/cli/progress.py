"""Progress on stderr for tasks that last longer than two seconds."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from speccompile.utils.progress import listening
from speccompile.utils.slow_progress import show_when_slow

#: Seconds between two lines about runs where stderr is not a terminal.
LINE_SECONDS = 60.0


@contextlib.contextmanager
def show_tasks() -> Iterator[None]:
    """Show progress of the package's own tasks."""
    shown: list[AbstractContextManager[None]] = []

    def end() -> None:
        shown.pop().__exit__(None, None, None)

    def report(description: str, begins: bool) -> None:
        if begins:
            shown.append(show_when_slow(description))
            shown[-1].__enter__()
        elif shown:
            end()

    try:
        with listening(report):
            yield
    finally:
        # A failed task never reports its end.
        while shown:
            end()


def _lines(description: str, total: int) -> Callable[[], None]:
    """A function that counts runs, and prints a line if :data:`LINE_SECONDS` have passed since the last one."""
    done, printed = 0, time.monotonic()

    def count() -> None:
        nonlocal done, printed
        done += 1
        if time.monotonic() - printed >= LINE_SECONDS:
            printed = time.monotonic()
            typer.echo(f"{description}: {done} of {total}", err=True)

    return count


@contextlib.contextmanager
def count_runs(description: str, total: int) -> Iterator[Callable[[], None]]:
    """Show a bar over ``total`` runs, or if stderr is not a terminal a line, and one more each minute. Call the yielded
    function after a run."""
    console = Console(stderr=True)
    if not console.is_terminal:
        with show_when_slow(description):
            yield _lines(description, total)
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    # Two updates per second: drawing needs a core, and the runs are being timed.
    with Progress(
        *columns,
        console=console,
        transient=True,
        refresh_per_second=2,
    ) as progress:
        bar = progress.add_task(description, total=total)
        yield lambda: progress.advance(bar)

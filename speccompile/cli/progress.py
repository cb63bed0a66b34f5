"""Progress on stderr for tasks that last longer than two seconds."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from speccompile.utils.progress import listening
from speccompile.utils.slow_progress import show_when_slow


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


@contextlib.contextmanager
def count_runs(description: str, total: int) -> Iterator[Callable[[], None]]:
    """Show a bar over ``total`` runs, or a line if stderr is not a terminal. Call the yielded function after a run."""
    console = Console(stderr=True)
    if not console.is_terminal:
        with show_when_slow(description):
            yield lambda: None
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

"""Shows work that takes seconds, on stderr."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import TypeAlias

#: Work of commands, and work that a terminal shows, is announced after this time.
_SLOW_SECONDS = 2.0
#: Work of a library call whose stderr is no terminal: a notebook, or the log of a program.
_SECONDS_IN_LOGS = 4.0

Stage: TypeAlias = Callable[[str], AbstractContextManager[None]]
"""Called with what is about to happen; the context it returns lasts as long as that."""


@contextlib.contextmanager
def show_when_slow(what: str) -> Iterator[None]:
    """Show ``what`` on stderr while the context lasts, from the second second on. Elsewhere than on a terminal it is a
    line."""
    with _shown(what, _SLOW_SECONDS):
        yield


@contextlib.contextmanager
def show_work_of_library(what: str) -> Iterator[None]:
    """Show ``what`` as :func:`show_when_slow` does. A line in the log of a program comes later."""
    with _shown(what, _SECONDS_IN_LOGS):
        yield


@contextlib.contextmanager
def _shown(what: str, seconds_in_logs: float) -> Iterator[None]:
    # Most programs never show anything.
    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    # Bound to the stderr of now, and without redirects: the conversion of a GGUF file redirects stderr meanwhile.
    console = Console(file=sys.stderr)
    progress = Progress(
        SpinnerColumn(),
        TextColumn("{task.description}"),
        TimeElapsedColumn(),
        console=console,
        transient=True,
        # Drawing takes a core from the work.
        refresh_per_second=2,
        redirect_stdout=False,
        redirect_stderr=False,
    )
    progress.add_task(what, total=None)

    def show() -> None:
        if console.is_terminal:
            progress.start()
        else:
            console.print(f"{what} ...", markup=False, highlight=False, soft_wrap=True)

    timer = threading.Timer(_SLOW_SECONDS if console.is_terminal else seconds_in_logs, show)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        # It may be starting the display right now; only then is there a display to stop.
        timer.join()
        if progress.live.is_started:
            progress.stop()

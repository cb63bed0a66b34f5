"""Display of slow work on stderr."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import TypeAlias

#: Seconds after which work of commands, and work on a terminal, is shown.
_SLOW_SECONDS = 2.0
#: Seconds for a library call whose stderr is not a terminal: a notebook, or the log of a program.
_SECONDS_IN_LOGS = 4.0

Stage: TypeAlias = Callable[[str], AbstractContextManager[None]]
"""Called with a description of the next work. The returned context lasts as long as the work."""


@contextlib.contextmanager
def show_when_slow(what: str) -> Iterator[None]:
    """Show ``what`` on stderr while the context lasts, after the first two seconds. If stderr is not a terminal, this
    prints one line."""
    with _shown(what, _SLOW_SECONDS):
        yield


@contextlib.contextmanager
def show_work_of_library(what: str) -> Iterator[None]:
    """Show ``what`` like :func:`show_when_slow`, but later if stderr is not a terminal, such as a program's log."""
    with _shown(what, _SECONDS_IN_LOGS):
        yield


@contextlib.contextmanager
def _shown(what: str, seconds_in_logs: float) -> Iterator[None]:
    # Imported late, since most programs never show anything.
    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    # Bound to the current stderr, and without redirects: the conversion of a GGUF file redirects stderr meanwhile.
    console = Console(file=sys.stderr)
    progress = Progress(
        SpinnerColumn(),
        TextColumn("{task.description}"),
        TimeElapsedColumn(),
        console=console,
        transient=True,
        # Drawing uses a core that the work needs.
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
        # The timer may be starting the display at this moment. It is joined before the display is stopped.
        timer.join()
        if progress.live.is_started:
            progress.stop()

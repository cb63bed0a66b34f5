"""Reports of build tasks, to the logger ``speccompile`` and to the callback of ``wrap(progress=...)``."""

from __future__ import annotations

import contextlib
import contextvars
import logging
import sys
import time
from collections.abc import Callable, Iterator

from speccompile.errors import InvalidOption
from speccompile.utils.slow_progress import show_work_of_library

#: Called with a description and whether the work begins (True) or has ended (False).
Progress = Callable[[str, bool], None]

logger = logging.getLogger("speccompile")

_listener: contextvars.ContextVar[Progress | None] = contextvars.ContextVar("listener", default=None)


def listener() -> Progress | None:
    """The callback that receives the tasks of the current thread; None without one."""
    return _listener.get()


@contextlib.contextmanager
def listening(progress: Progress | None) -> Iterator[None]:
    """Report the tasks of this context to ``progress``. None keeps the current listener.

    Raises:
        InvalidOption: ``progress`` cannot be called.
    """
    if progress is not None and not callable(progress):
        reason = "use a function of a description (str) and of whether that work begins (bool), or None"
        raise InvalidOption(where="wrap", name="progress", value=progress, reason=reason)
    token = _listener.set(_listener.get() if progress is None else progress)
    try:
        yield
    finally:
        _listener.reset(token)


@contextlib.contextmanager
def task(description: str) -> Iterator[None]:
    """Report work that may need seconds. Without a listener, slow work is shown on stderr."""
    report, started = _listener.get(), time.perf_counter()
    shown = report is None and sys.stderr is not None
    if report is not None:
        report(description, True)
    try:
        with show_work_of_library(description) if shown else contextlib.nullcontext():
            yield
        logger.info("%s: %.2f s", description, time.perf_counter() - started)
    finally:
        if report is not None:
            report(description, False)

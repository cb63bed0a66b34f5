"""Says what is being built, to whoever listens (the command line does)."""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Callable, Iterator

Listener = Callable[[str, bool], None]

#: Called with a description and whether the work begins (True) or has ended (False).
listener: contextvars.ContextVar[Listener | None] = contextvars.ContextVar("listener", default=None)


@contextlib.contextmanager
def task(description: str) -> Iterator[None]:
    """Work that may take seconds."""
    report = listener.get()
    if report is not None:
        report(description, True)
    try:
        yield
    finally:
        if report is not None:
            report(description, False)

"""Ctrl-C between two steps, but not inside of a step."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from typing import Any


@contextlib.contextmanager
def deferred_interrupts() -> Iterator[None]:
    """Defer a ``KeyboardInterrupt`` until the end of this context.

    Python raises it between any two instructions of the main thread, also between acquiring a lock and the ``try`` that
    releases it. Other threads receive none. A program that handles the signal itself is not affected.
    """
    main = threading.current_thread() is threading.main_thread()
    if not main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    seen: list[tuple[int, Any]] = []
    signal.signal(signal.SIGINT, lambda number, frame: seen.append((number, frame)))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        if seen:
            signal.default_int_handler(*seen[0])

"""Python's collector of reference cycles."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator

from speccompile.utils.forks import in_child

# After so many new objects, after so many young collections, and after so many of the middle ones.
_RARE = (50_000, 20, 20)

_before: tuple[int, int, int] | None = None


@contextlib.contextmanager
def rare_collections() -> Iterator[None]:
    """The process collects more rarely meanwhile. A build makes hundreds of thousands of nodes and symbols, most of
    which stay until its end; to visit them again and again takes a twentieth of its time. Where collections are off, or
    as rare, nothing changes. One thread at a time.
    """
    global _before
    thresholds = gc.get_threshold()
    if thresholds[0] == 0 or thresholds[0] >= _RARE[0]:
        yield
        return
    _before = thresholds
    gc.set_threshold(*_RARE)
    try:
        yield
    finally:
        _restore()


def _restore() -> None:
    """Also in a forked child, which may not have the thread that would."""
    global _before
    if _before is not None:
        gc.set_threshold(*_before)
        _before = None


in_child(_restore)

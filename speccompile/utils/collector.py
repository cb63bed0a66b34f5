"""Python's collector of reference cycles."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator

from speccompile.utils.forks import in_child

# Thresholds: new objects, young collections, middle collections.
_RARE = (50_000, 20, 20)

_before: tuple[int, int, int] | None = None


@contextlib.contextmanager
def rare_collections() -> Iterator[None]:
    """Run Python's garbage collector more rarely in this context.

    A build creates hundreds of thousands of nodes and symbols, most of which live until its end. Visiting them
    repeatedly costs a twentieth of its time. Nothing changes if the collector is off, or already runs as rarely. Only
    one thread may be in this context.
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
    """Restore the thresholds. A forked child also calls this, since it may not have the thread that would."""
    global _before
    if _before is not None:
        gc.set_threshold(*_before)
        _before = None


in_child(_restore)

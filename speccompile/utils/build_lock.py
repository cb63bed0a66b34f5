"""One build at a time: tracers and compilers keep state that belongs to the process, not to a thread."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

from speccompile.utils.forks import in_child

_lock = threading.RLock()


@contextlib.contextmanager
def one_build() -> Iterator[None]:
    """Wait until no other thread builds, and exclude other builds meanwhile. A thread may nest it.

    The order of locks: a thread that runs a step may enter a build, and a thread that builds never waits for a step.
    """
    with _lock:
        yield


def _after_fork() -> None:
    """Replace the lock in a forked child. The thread that held it may not exist there."""
    global _lock
    _lock = threading.RLock()


in_child(_after_fork)

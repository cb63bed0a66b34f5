"""The open engines of the process: closed when the interpreter ends, adapted in a forked child."""

from __future__ import annotations

import atexit
import weakref
from typing import Protocol

from speccompile.utils.forks import in_child


class OpenEngine(Protocol):
    """The interface of an engine for this module."""

    def close(self) -> None:
        """End all requests. A closed engine stays closed."""

    def after_fork(self) -> None:
        """Drop the threads and locks of the parent process."""


_open: weakref.WeakSet[OpenEngine] = weakref.WeakSet()


def add(engine: OpenEngine) -> None:
    """Close ``engine`` at the end of the interpreter, if it still exists."""
    _open.add(engine)


def _after_fork() -> None:
    for engine in list(_open):
        engine.after_fork()


in_child(_after_fork)


@atexit.register
def _close_all() -> None:
    """Close all engines. A daemon thread within a step would crash the process when the interpreter ends."""
    for engine in list(_open):
        engine.close()

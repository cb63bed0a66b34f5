"""How long runs take on their device, without waiting for any."""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch

from speccompile.utils.devices import traits_of

#: Gets the seconds of one run.
Note = Callable[[float], object]


class Clock(Protocol):
    def time(self, note: Note) -> contextlib.AbstractContextManager[None]:
        """Have ``note`` told how long what is run inside takes, at once or when a later run begins."""


class HostClock:
    """Where a run has ended when it returns."""

    @contextlib.contextmanager
    def time(self, note: Note) -> Iterator[None]:
        started = time.perf_counter()
        yield
        note(time.perf_counter() - started)


class EventClock:
    """On a GPU, between two events of the stream: the time that a run takes there, not the one it takes to launch it.

    Args:
        make: a new event that keeps time, as ``torch.cuda.Event`` has it.
    """

    def __init__(self, make: Callable[[], Any]) -> None:
        self._make = make
        self._free: list[Any] = []
        self._running: deque[tuple[Any, Any, Note]] = deque()

    @contextlib.contextmanager
    def time(self, note: Note) -> Iterator[None]:
        self._tell()
        begin, end = self._event(), self._event()
        begin.record()
        yield
        end.record()
        self._running.append((begin, end, note))

    def _event(self) -> Any:
        return self._free.pop() if self._free else self._make()

    def _tell(self) -> None:
        while self._running and self._running[0][1].query():
            begin, end, note = self._running.popleft()
            note(begin.elapsed_time(end) / 1e3)
            self._free += (begin, end)


def clock_of(device: torch.device) -> Clock:
    if not traits_of(device).asynchronous:
        return HostClock()
    return EventClock(lambda: torch.cuda.Event(enable_timing=True))

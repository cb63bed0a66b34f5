"""Durations of runs on their device, measured without waiting for them."""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch

from speccompile.utils.devices import traits_of

#: Receives the seconds of one run.
Note = Callable[[float], object]


class Clock(Protocol):
    """Measures the duration of a run on its device."""

    def time(self, note: Note) -> contextlib.AbstractContextManager[None]:
        """Call ``note`` with the duration of the work in this context: at its end, or when a later run begins."""

    def report(self) -> None:
        """Call the ``note`` of every run that has ended by now."""


class HostClock:
    """A clock for devices where a run has ended when it returns."""

    @contextlib.contextmanager
    def time(self, note: Note) -> Iterator[None]:
        started = time.perf_counter()
        yield
        note(time.perf_counter() - started)

    def report(self) -> None:
        """Do nothing: every run is reported at its end."""


class EventClock:
    """A clock for a GPU. It measures the time between two events of the stream: that of the run, not of its launch.

    Args:
        create: creates an event with timing, such as ``torch.cuda.Event``.
    """

    def __init__(self, create: Callable[[], Any]) -> None:
        self._create = create
        self._free: list[Any] = []
        self._running: deque[tuple[Any, Any, Note]] = deque()

    @contextlib.contextmanager
    def time(self, note: Note) -> Iterator[None]:
        self.report()
        begin, end = self._event(), self._event()
        begin.record()
        yield
        end.record()
        self._running.append((begin, end, note))

    def _event(self) -> Any:
        return self._free.pop() if self._free else self._create()

    def report(self) -> None:
        """Call the ``note`` of every run that has ended by now."""
        while self._running and self._running[0][1].query():
            begin, end, note = self._running.popleft()
            note(begin.elapsed_time(end) / 1e3)
            self._free += (begin, end)


def clock_of(device: torch.device) -> Clock:
    """Return the clock of a device: the host's if runs end before the call returns, else events."""
    if not traits_of(device).asynchronous:
        return HostClock()
    return EventClock(lambda: torch.cuda.Event(enable_timing=True))

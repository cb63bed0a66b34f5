"""Requests that have no slot yet."""

from __future__ import annotations

import bisect
import itertools
import threading

from speccompile.errors import QueueFull
from speccompile.runtime.request import Request


class WaitingQueue:
    """Bounded; by priority, then first come, first served. Any thread may use it."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._lock = threading.Lock()
        self._order = itertools.count()
        self._entries: list[tuple[int, int, Request]] = []

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def requests(self) -> list[Request]:
        """Those that wait, in order."""
        with self._lock:
            return [request for *_, request in self._entries]

    def push(self, requests: list[Request], free_slots: int) -> None:
        """All of them, or none. Who will have one of the free slots does not count as waiting.

        Raises:
            QueueFull: there is no room.
        """
        with self._lock:
            if len(self._entries) + len(requests) > self.limit + free_slots:
                raise QueueFull(count=len(requests), waiting=len(self._entries), limit=self.limit)
            for request in requests:
                bisect.insort(self._entries, (-request.params.priority, next(self._order), request))

    def pop(self) -> Request | None:
        """Take the next one out."""
        with self._lock:
            return self._entries.pop(0)[2] if self._entries else None

    def remove(self, request: Request) -> None:
        """Take out one that was cancelled, if it is still here."""
        with self._lock:
            self._entries = [entry for entry in self._entries if entry[2] is not request]

    def after_fork(self) -> list[Request]:
        """In a forked child, with a lock that no other thread holds: what waits."""
        self._lock = threading.Lock()
        return self.requests

    def drain(self) -> list[Request]:
        """Take out all."""
        with self._lock:
            taken, self._entries = [entry[2] for entry in self._entries], []
            return taken

"""Requests that have no slot yet."""

from __future__ import annotations

import threading

from speccompile.errors import ClientQueueFull, QueueFull
from speccompile.runtime.request import Request


class WaitingQueue:
    """Bounded, in the order of submission. Any thread may use it.

    Attributes:
        limit: most requests that wait.
        client_limit: most requests of one client that wait; None is no limit. Requests without a client have none.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.client_limit: int | None = None
        self._lock = threading.Lock()
        self._requests: list[Request] = []

    def __len__(self) -> int:
        return len(self._requests)

    @property
    def requests(self) -> list[Request]:
        """Those that wait, in order."""
        with self._lock:
            return list(self._requests)

    def push(self, requests: list[Request], free_slots: int) -> None:
        """All of them, or none. Those that will have one of the free slots are not counted.

        Args:
            requests: of one client.

        Raises:
            QueueFull: the queue is full, or this client's share of it is.
        """
        with self._lock:
            count, waiting = len(requests), len(self._requests)
            if waiting + count > self.limit + free_slots:
                raise QueueFull(count=count, waiting=waiting, limit=self.limit)
            client = requests[0].params.client[0] if requests else ""
            if self.client_limit is not None and client:
                waiting = sum(request.params.client[0] == client for request in self._requests)
                if waiting + count > self.client_limit + free_slots:
                    raise ClientQueueFull(client=client, count=count, waiting=waiting, limit=self.client_limit)
            self._requests += requests

    def remove(self, request: Request) -> bool:
        """Take out ``request``; false if it does not wait."""
        with self._lock:
            count = len(self._requests)
            self._requests = [waiting for waiting in self._requests if waiting is not request]
            return len(self._requests) < count

    def after_fork(self) -> list[Request]:
        """In a forked child, with a lock that no other thread holds: what waits."""
        self._lock = threading.Lock()
        return self.requests

    def drain(self) -> list[Request]:
        """Take out all."""
        with self._lock:
            taken, self._requests = self._requests, []
            return taken

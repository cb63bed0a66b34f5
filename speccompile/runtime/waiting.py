"""Requests that have no slot yet."""

from __future__ import annotations

import threading

from speccompile.errors import ClientQueueFull, QueueFull
from speccompile.runtime.request import Request


class WaitingQueue:
    """A bounded queue in the order of submission. Any thread may use it.

    Attributes:
        limit: most requests that wait.
        client_limit: most requests of one client that wait; None means no limit. It does not apply to requests without
            a client.
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
        """The waiting requests, in order."""
        with self._lock:
            return list(self._requests)

    def push(self, requests: list[Request], free_slots: int) -> None:
        """Queue all of ``requests``, or none. Those that will get one of the free slots are not counted.

        Args:
            requests: requests of one client.

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

    def put_back(self, request: Request) -> None:
        """Queue a request again that has had a slot, before all others."""
        with self._lock:
            self._requests.insert(0, request)

    def remove(self, request: Request) -> bool:
        """Remove ``request``. Return False if it does not wait."""
        with self._lock:
            count = len(self._requests)
            self._requests = [waiting for waiting in self._requests if waiting is not request]
            return len(self._requests) < count

    def after_fork(self) -> list[Request]:
        """Replace the lock in a forked child, and return the waiting requests."""
        self._lock = threading.Lock()
        return self.requests

    def drain(self) -> list[Request]:
        """Remove all requests, and return them."""
        with self._lock:
            taken, self._requests = self._requests, []
            return taken

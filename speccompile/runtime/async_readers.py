"""The readers of requests in asyncio event loops."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from speccompile.runtime.request import Request


@dataclass
class AsyncReaders:
    """The readers that wait, and their requests.

    The lock of :class:`~speccompile.runtime.engine_loop.EngineLoop` guards it.
    """

    _waiting: dict[asyncio.Event, tuple[asyncio.AbstractEventLoop, Request, int]] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, woken: asyncio.Event, request: Request, seen: int) -> None:
        """The running loop waits for ``woken``, until ``request`` has ended or has more than ``seen`` new tokens."""
        self._waiting[woken] = (asyncio.get_running_loop(), request, seen)

    def remove(self, woken: asyncio.Event) -> None:
        """Wake ``woken`` no longer."""
        self._waiting.pop(woken, None)

    def clear(self) -> None:
        """Forget all readers."""
        self._waiting.clear()

    def wake(self) -> list[Request]:
        """Wake the readers that have something to read. Returns the requests whose loop was closed meanwhile."""
        left = []
        for woken, (loop, request, seen) in list(self._waiting.items()):
            if request.finished or len(request.new_tokens) > seen:
                try:
                    loop.call_soon_threadsafe(woken.set)
                except RuntimeError:
                    del self._waiting[woken]
                    left.append(request)
        return left

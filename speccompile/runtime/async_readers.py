"""The readers of requests in asyncio event loops."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from speccompile.runtime.request import Request


@dataclass
class AsyncReaders:
    """The readers that wait, with their requests.

    The lock of :class:`~speccompile.runtime.engine_loop.EngineLoop` guards this object.
    """

    _waiting: dict[asyncio.Event, tuple[asyncio.AbstractEventLoop, Request, int]] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, woken: asyncio.Event, request: Request, seen: int) -> None:
        """Add ``woken``. The running loop waits for it until ``request`` ends or has more than ``seen`` new tokens."""
        self._waiting[woken] = (asyncio.get_running_loop(), request, seen)

    def remove(self, woken: asyncio.Event) -> None:
        """Remove ``woken``, so it is not woken any more."""
        self._waiting.pop(woken, None)

    def clear(self) -> None:
        """Forget all readers."""
        self._waiting.clear()

    def wake(self) -> list[Request]:
        """Wake the readers with something to read. Return the requests whose event loop was closed meanwhile."""
        left = []
        for woken, (loop, request, seen) in list(self._waiting.items()):
            if request.finished or len(request.new_tokens) > seen:
                try:
                    loop.call_soon_threadsafe(woken.set)
                except RuntimeError:
                    del self._waiting[woken]
                    left.append(request)
        return left

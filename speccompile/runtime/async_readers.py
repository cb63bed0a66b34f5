"""Readers in asyncio event loops, and the thread that steps for them."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from speccompile.runtime.request import Request

if TYPE_CHECKING:
    from speccompile.runtime.turns import Turns

# How long the driver sleeps when all readers have everything.
IDLE_SECONDS = 0.01


@dataclass
class AsyncReaders:
    """Who waits for which request. Used under the lock of :class:`~speccompile.runtime.turns.Turns`."""

    _waiting: dict[asyncio.Event, tuple[asyncio.AbstractEventLoop, Request, int]] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, woken: asyncio.Event, request: Request, seen: int) -> None:
        """The running loop waits for ``woken``, until ``request`` has ended or has more than ``seen`` new tokens."""
        self._waiting[woken] = (asyncio.get_running_loop(), request, seen)

    def remove(self, woken: asyncio.Event) -> None:
        self._waiting.pop(woken, None)

    def clear(self) -> None:
        self._waiting.clear()

    def wake(self) -> list[Request]:
        """Wake those that have something to read; returns the requests whose loop was closed meanwhile."""
        left = []
        for woken, (loop, request, seen) in list(self._waiting.items()):
            if request.finished or len(request.new_tokens) > seen:
                try:
                    loop.call_soon_threadsafe(woken.set)
                except RuntimeError:
                    del self._waiting[woken]
                    left.append(request)
        return left


class AsyncDriver:
    """A thread of its own that takes turns while async readers wait."""

    def __init__(self, turns: Turns) -> None:
        self._turns = turns
        self._thread: threading.Thread | None = None

    async def wait(self, request: Request, seen: int) -> None:
        """Return when ``request`` has ended or has more than ``seen`` new tokens."""
        turns = self._turns
        turns.refuse_callback("waiting for a request")
        woken = asyncio.Event()
        try:
            with turns.changed:
                # Looked at under the lock under which readers are woken: no token can come in between unseen.
                if request.finished or len(request.new_tokens) > seen:
                    return
                turns.readers.add(woken, request, seen)
                self._ensure_thread()
            await woken.wait()
        finally:
            with turns.changed:
                turns.readers.remove(woken)

    def after_fork(self) -> None:
        """In a forked child, which has no such thread."""
        self._thread = None

    def _ensure_thread(self) -> None:
        if self._thread is None and len(self._turns.readers) and not self._turns.closed:
            thread = threading.Thread(target=self._drive, name="speccompile-driver", daemon=True)
            thread.start()
            self._thread = thread

    def _drive(self) -> None:
        turns = self._turns
        try:
            with turns.serving():
                while len(turns.readers) and not turns.closed:
                    if turns.idle:
                        with turns.changed:
                            turns.changed.wait(IDLE_SECONDS)
                    turns.turn()
        finally:
            # A reader may have come meanwhile, or a callback asked this thread to exit.
            with turns.changed:
                self._thread = None
                self._ensure_thread()

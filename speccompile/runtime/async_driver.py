"""The thread that steps for readers in asyncio event loops."""

from __future__ import annotations

import asyncio
import threading

from speccompile.runtime.request import Request
from speccompile.runtime.turns import Turns

# How long the thread sleeps when all readers have read everything.
IDLE_SECONDS = 0.01


class AsyncDriver:
    """Takes turns in a separate thread while async readers wait."""

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
                # Under the lock under which readers are woken, so that no token is missed in between.
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
            # A reader may have come meanwhile, or a callback made this thread exit.
            with turns.changed:
                self._thread = None
                self._ensure_thread()

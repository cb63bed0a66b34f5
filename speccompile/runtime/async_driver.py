"""The thread that steps for readers in asyncio event loops."""

from __future__ import annotations

import asyncio
import threading

from speccompile.runtime.engine_loop import EngineLoop
from speccompile.runtime.request import Request

# Seconds of sleep when all readers have read everything.
IDLE_SECONDS = 0.01


class AsyncDriver:
    """Steps in a separate thread while async readers wait."""

    def __init__(self, loop: EngineLoop) -> None:
        self._loop = loop
        self._thread: threading.Thread | None = None

    async def wait(self, request: Request, seen: int) -> None:
        """Wait until ``request`` has ended or has more than ``seen`` new tokens."""
        loop = self._loop
        loop.refuse_callback("waiting for a request")
        woken = asyncio.Event()
        try:
            with loop.changed:
                # Checked under the lock under which readers are woken, so no token is missed in between.
                if request.finished or len(request.new_tokens) > seen:
                    return
                loop.readers.add(woken, request, seen)
                self._ensure_thread()
            await woken.wait()
        finally:
            with loop.changed:
                loop.readers.remove(woken)

    def after_fork(self) -> None:
        """Adapt to a forked child, which does not have the thread."""
        self._thread = None

    def _ensure_thread(self) -> None:
        if self._thread is None and len(self._loop.readers) and not self._loop.closed:
            thread = threading.Thread(target=self._drive, name="speccompile-driver", daemon=True)
            thread.start()
            self._thread = thread

    def _drive(self) -> None:
        loop = self._loop
        try:
            with loop.serving():
                while len(loop.readers) and not loop.closed:
                    if loop.idle:
                        with loop.changed:
                            loop.changed.wait(IDLE_SECONDS)
                    loop.step_or_wait()
        finally:
            # A reader may have been added meanwhile, or a callback ended this thread.
            with loop.changed:
                self._thread = None
                self._ensure_thread()

"""The end of an engine: closed, deleted, or left to the parent of a forked process."""

from __future__ import annotations

import weakref

from speccompile.ranks.ranks import Ranks
from speccompile.runtime.async_driver import AsyncDriver
from speccompile.runtime.engine_loop import EngineLoop
from speccompile.runtime.learning import HeadTraining
from speccompile.runtime.saver import Saver


class Shutdown:
    """Ends the other work of an engine beside its steps: threads, files, and other ranks."""

    def __init__(
        self, loop: EngineLoop, driver: AsyncDriver, training: HeadTraining, ranks: Ranks | None, saver: Saver | None
    ) -> None:
        self._loop = loop
        self._driver = driver
        self._training = training
        self._ranks = ranks
        self._saver = saver

    def write_when_dropped(self, engine: object) -> None:
        """Let an engine that is deleted without ``close()`` write its pending records. At exit ``open_engines`` closes
        the engine."""
        assert self._saver is not None
        self._dropped = weakref.finalize(engine, self._saver.writer.close)
        self._dropped.atexit = False

    def close(self) -> None:
        """Close the engine, for :meth:`speccompile.runtime.engine.Engine.close`."""
        self._loop.close()
        if self._ranks is not None:
            self._ranks.close()
        self._training.close()
        # In a callback the current step may still end a request. Records are then written when the interpreter ends.
        if self._saver is not None and not self._loop.forked and not self._loop.holds_lock:
            self._dropped.detach()
            self._saver.writer.close()

    def after_fork(self) -> None:
        """Adapt all parts to a forked child."""
        self._loop.after_fork()
        self._driver.after_fork()
        if self._ranks is not None:
            self._ranks.after_fork()
        self._training.after_fork()
        if self._saver is not None:
            # The files belong to the parent.
            self._dropped.detach()

"""Turns: any thread may want a step, one at a time takes it, and the others wait for what it brings."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

from speccompile.errors import Closed, ForkedSpeculator, InsideStep
from speccompile.graph.keys import Kind
from speccompile.runtime.request import Request
from speccompile.runtime.stepper import Stepper
from speccompile.utils.interrupts import deferred_interrupts
from speccompile.utils.streams import stream_of_turns
from speccompile.utils.workers import release_workers

# How long a thread that drives for async readers looks away when they have everything.
IDLE_SECONDS = 0.01


class Turns(Stepper):
    """Steps by whoever wants one: a caller of :meth:`step`, a thread that waits for a request, one that serves, or one
    of its own that lives while async readers wait."""

    def __init__(self, **stepper: Any) -> None:
        super().__init__(**stepper)
        self._turn_lock = threading.Lock()
        self._turn_owner: int | None = None
        # Guards what follows, and tells waiting threads that a turn has ended.
        self._changed = threading.Condition()
        self._begun = 0
        self._turns = 0
        self._waiting_threads = 0
        # Threads that do nothing but step: while there are any, nobody else takes turns to get what he waits for.
        self._servers: set[int] = set()
        self._closed = False
        #: What is raised once it is closed.
        self.closed_error: type[Closed] = Closed
        self._async_readers: dict[asyncio.Event, tuple[asyncio.AbstractEventLoop, Request, int]] = {}
        self._async_driver: threading.Thread | None = None
        # Requests that ended outside of a step and still have a slot, a row or a listener.
        self._ended: deque[Request] = deque()
        # Requests whose last reader has left, in whatever place a finalizer ran.
        self._abandoned: deque[Request] = deque()
        # Why it cannot step in this process, if it cannot.
        self._forked = ""

    # --- stepping ------------------------------------------------------------------------------------

    @property
    def idle(self) -> bool:
        """Nothing waits, nothing runs, and no step is on."""
        begun = self._begun
        if self._turn_lock.locked():
            return False
        # A turn that begins meanwhile may have a request in its hands, no longer in the queue and not yet in a slot.
        return super().idle and not self._turn_lock.locked() and begun == self._begun

    def step(self) -> list[Request]:
        """One step: read waiting prompts within the budget, then run one tier over all rows; returns the requests that
        had a row.

        Raises:
            Closed, InsideStep.
        """
        if self._closed:
            raise self.closed_error()
        self._refuse_callback("step()")
        with self._own_turn():
            return self._step()

    def run(self) -> None:
        """Step until nothing waits and nothing runs."""
        while not self.idle and not self._closed:
            self._turn(lambda: self.idle or self._closed)

    def serve(self) -> None:
        """Step until :meth:`close`, and sleep while there is nothing to do. Returns only then, so run it in a
        thread: ``threading.Thread(target=spec.engine.serve).start()``. Without it, a thread that waits for a request
        steps.
        """
        self._refuse_callback("serve()")
        with self._serving():
            while not self._closed:
                self._turn()
                with self._changed:
                    self._changed.wait_for(lambda: self._closed or not self.idle)

    @contextlib.contextmanager
    def _serving(self) -> Iterator[None]:
        me = threading.get_ident()
        self._servers.add(me)
        try:
            yield
        finally:
            with self._changed:
                self._servers.discard(me)
                # Whoever waits has to step for himself now.
                self._turns += 1
                self._changed.notify_all()

    def _turn(self, done: Callable[[], bool] = lambda: False, timeout: float | None = None) -> None:
        """Take a turn, or wait until another thread's turn has ended or ``done``, what the caller wants, is true."""
        self._refuse_callback("waiting for a request")
        turns = self._turns
        mine = not self._servers or threading.get_ident() in self._servers
        if mine:
            with self._own_turn(blocking=False) as own:
                if own:
                    self._step()
                    return
        with self._changed:
            self._waiting_threads += mine
            try:
                # The turn that did it may have ended before ``turns`` was read, and be the last for long.
                self._changed.wait_for(lambda: self._turns != turns or done(), timeout)
            finally:
                self._waiting_threads -= mine

    def _refuse_callback(self, what: str) -> None:
        self._check_process()
        if self._turn_owner == threading.get_ident():
            raise InsideStep(what=what)

    def _step(self) -> list[Request]:
        return [] if self._closed else self.run_step()

    @contextlib.contextmanager
    def _own_turn(self, *, blocking: bool = True) -> Iterator[bool]:
        """Have the turn, and clean up before and behind; without ``blocking`` False if another thread has it."""
        with deferred_interrupts(), stream_of_turns(self.arena.device):
            if not self._turn_lock.acquire(blocking):
                yield False
                return
            self._begun += 1
            self._turn_owner = threading.get_ident()
            try:
                self._retire_ended()
                yield True
                self._retire_ended()
            finally:
                interrupt, self._interrupt = self._interrupt, None
                if self.arena.device.type == "cpu" and (self._waiting_threads or super().idle):
                    # The next turn may be another thread's.
                    release_workers()
                self._turn_owner = None
                self._turn_lock.release()
                with self._changed:
                    self._turns += 1
                    self._changed.notify_all()
                    self._wake_async_readers()
                self._tidy()
            if interrupt is not None:
                raise interrupt

    def _tidy(self) -> None:
        """Clean up behind requests that ended outside of a step: now, or at the end of the turn that is on."""
        if self._ended:
            with self._own_turn(blocking=False):
                pass

    def _wake_async_readers(self) -> None:
        for woken, (loop, request, seen) in list(self._async_readers.items()):
            if request.finished or len(request.new_tokens) > seen:
                try:
                    loop.call_soon_threadsafe(woken.set)
                except RuntimeError:
                    # Its loop was closed under it: nobody reads on.
                    del self._async_readers[woken]
                    if request.end("cancelled"):
                        self._ended.append(request)

    def _end_abandoned(self) -> None:
        """Take those that nothing reads any more out of the queue; slots are taken back by the next turn."""
        while self._abandoned:
            request = self._abandoned.popleft()
            request.end("cancelled")
            self.waiting.remove(request)
            self._ended.append(request)

    def _retire_ended(self) -> None:
        while True:
            self._end_abandoned()
            if self._closed:
                left = [*self.waiting.drain(), *self.running]
                self._ended.extend(request for request in left if request.end("cancelled"))
            if not self._ended:
                return
            self._retire([self._ended.popleft()])

    # --- waiting (what Request asks for) -------------------------------------------------------------

    def ended(self, request: Request) -> None:
        self.waiting.remove(request)
        self._ended.append(request)
        self._tidy()

    def abandoned(self, request: Request) -> None:
        self._abandoned.append(request)

    def wait(self, request: Request, seen: int, timeout: float | None = None) -> None:
        def done() -> bool:
            return request.finished or len(request.new_tokens) > seen

        if not done():
            self._turn(done, timeout)

    async def wait_async(self, request: Request, seen: int) -> None:
        self._refuse_callback("waiting for a request")
        woken = asyncio.Event()
        try:
            with self._changed:
                # Looked at under the lock under which readers are woken: no token can come in between unseen.
                if request.finished or len(request.new_tokens) > seen:
                    return
                self._async_readers[woken] = (asyncio.get_running_loop(), request, seen)
                self._ensure_driver()
            await woken.wait()
        finally:
            with self._changed:
                self._async_readers.pop(woken, None)

    def _ensure_driver(self) -> None:
        if self._async_driver is None and self._async_readers and not self._closed:
            driver = threading.Thread(target=self._drive, name="speccompile-driver", daemon=True)
            driver.start()
            self._async_driver = driver

    def _drive(self) -> None:
        """Step for async readers, as long as there are any."""
        try:
            with self._serving():
                while self._async_readers and not self._closed:
                    if self.idle:
                        with self._changed:
                            self._changed.wait(IDLE_SECONDS)
                    self._turn()
        finally:
            # A reader may have come meanwhile, or somebody's callback asked this thread to exit.
            with self._changed:
                self._async_driver = None
                self._ensure_driver()

    def prepare_in_turn(self, kind: Kind, *, watched: bool) -> None:
        """:meth:`prepare`, from any thread. Steps of other threads go on meanwhile, unless the executables run over the
        arena when they are made."""
        alone = self._parks and self._turn_owner != threading.get_ident()
        with self._own_turn() if alone else contextlib.nullcontext():
            self.prepare(kind, watched=watched)
        if not alone and self.arena.device.type == "cpu":
            # The next turn may be another thread's.
            release_workers()

    # --- the end -------------------------------------------------------------------------------------

    def after_fork(self) -> None:
        """In a forked child: threads that held locks, served or drove for readers are none of the child's."""
        if self.arena.device.type != "cpu":
            self._forked = f"its state is on {self.arena.device}, which a forked process cannot use"
        elif self.saver is not None:
            self._forked = "it saves hidden states, and both processes would write the same files"
        elif self._turn_lock.locked():
            self._forked = "a step was running when the process was forked, so its state is incomplete"
        self._turn_lock, self._changed = threading.Lock(), threading.Condition()
        self._turn_owner, self._waiting_threads, self._async_driver = None, 0, None
        self._servers.clear()
        self._async_readers.clear()
        for request in [*self.waiting.after_fork(), *self.running]:
            request.after_fork()

    def _check_process(self) -> None:
        if self._forked:
            raise ForkedSpeculator(reason=self._forked)

    def close(self) -> None:
        """Cancel whatever waits or runs, and take no more requests."""
        with self._changed:
            self._closed = True
        if self._forked:
            return
        if self._turn_owner == threading.get_ident():
            return  # In a callback: the turn that is on cleans up when it ends.
        with self._own_turn():
            pass

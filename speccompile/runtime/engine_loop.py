"""The engine's loop: it decides which thread steps. One thread at a time holds its lock; others wait for results."""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable, Iterator

import torch

from speccompile.errors import Closed, ForkedSpeculator, InsideStep
from speccompile.runtime.async_readers import AsyncReaders
from speccompile.runtime.request import Request
from speccompile.runtime.retirement import Retirement
from speccompile.runtime.scheduler import Scheduler
from speccompile.runtime.slots import Slots
from speccompile.runtime.waiting import WaitingQueue
from speccompile.utils.devices import traits_of
from speccompile.utils.interrupts import deferred_interrupts
from speccompile.utils.streams import engine_stream
from speccompile.utils.workers import release_workers


class EngineLoop:
    """Runs steps in the thread that needs one: a caller of :meth:`step`, a thread that waits for a request, a thread
    that serves, or the driver of async readers.

    Args:
        saves: whether hidden states are saved, to files of this process.

    Attributes:
        changed: guards the state that threads share. It is notified when the engine's lock is released.
        readers: async callers that wait.
        closed_error: the class of the error that is raised after :meth:`close`.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        waiting: WaitingQueue,
        slots: Slots,
        retirement: Retirement,
        device: torch.device,
        *,
        saves: bool,
    ) -> None:
        self._scheduler = scheduler
        self._waiting = waiting
        self._slots = slots
        self._retirement = retirement
        self._device = device
        self._on_host = traits_of(device).host_memory
        self._saves = saves
        self.changed = threading.Condition()
        self.readers = AsyncReaders()
        self.closed = False
        self.closed_error: type[Closed] = Closed
        self._lock = threading.Lock()
        self._owner: int | None = None
        self._acquired = 0
        self._released = 0
        self._waiting_threads = 0
        # Threads that only step. While there are any, a thread that waits for a request does not step.
        self._servers: set[int] = set()
        # Requests that ended outside of a step and still have a slot, a row or a listener.
        self._ended: deque[Request] = deque()
        # Requests whose last reader is gone. Finalizers append to it.
        self._abandoned: deque[Request] = deque()
        # The reason why this process cannot step; empty if it can.
        self._forked = ""

    # --- stepping ------------------------------------------------------------------------------------

    @property
    def idle(self) -> bool:
        """Whether no request waits or runs, and no step is in progress."""
        started = self._acquired
        if self._lock.locked():
            return False
        # A step that begins meanwhile may hold a request that has left the queue and has no slot yet.
        return self._is_empty and not self._lock.locked() and started == self._acquired

    @property
    def _is_empty(self) -> bool:
        """Whether no request waits, owns a slot or has unread results."""
        return not (self._slots.owned or len(self._waiting) or self._scheduler.flights)

    def step(self) -> list[Request]:
        """Run one step, and return the requests that had a row.

        Raises:
            Closed, InsideStep.
        """
        if self.closed:
            raise self.closed_error()
        self.refuse_callback("step()")
        with self.exclusive():
            return [] if self.closed else self._scheduler.run_step()

    def run(self) -> None:
        """Step until no request waits or runs."""
        while not self.idle and not self.closed:
            self.step_or_wait(lambda: self.idle or self.closed)

    def serve(self) -> None:
        """Step until the engine is closed. Sleep while no request waits or runs."""
        self.refuse_callback("serve()")
        with self.serving():
            while not self.closed:
                self.step_or_wait()
                with self.changed:
                    self.changed.wait_for(lambda: self.closed or not self.idle)

    @contextlib.contextmanager
    def serving(self) -> Iterator[None]:
        """Let the current thread step for all other threads in this context."""
        me = threading.get_ident()
        self._servers.add(me)
        try:
            yield
        finally:
            with self.changed:
                self._servers.discard(me)
                # Waiting threads step themselves from now on.
                self._released += 1
                self.changed.notify_all()

    def step_or_wait(self, done: Callable[[], bool] = lambda: False, timeout: float | None = None) -> None:
        """Run a step, unless another thread serves or holds the engine's lock. In that case wait until that thread
        releases the lock, or the caller's condition ``done`` is true."""
        self.refuse_callback("waiting for a request")
        released = self._released
        mine = not self._servers or threading.get_ident() in self._servers
        if mine:
            with self.exclusive(blocking=False) as acquired:
                if acquired:
                    if not self.closed:
                        self._scheduler.run_step()
                    return
        with self.changed:
            self._waiting_threads += mine
            try:
                # ``done`` may have become true before ``released`` was read, and the next release may come late.
                self.changed.wait_for(lambda: self._released != released or done(), timeout)
            finally:
                self._waiting_threads -= mine

    def refuse_callback(self, what: str) -> None:
        """Check that this thread may wait for a step.

        Raises:
            InsideStep: this thread is in a step.
            ForkedSpeculator: this process cannot step.
        """
        self.check_process()
        if self.holds_lock:
            raise InsideStep(what=what)

    @property
    def holds_lock(self) -> bool:
        """Whether the current thread holds the engine's lock."""
        return self._owner == threading.get_ident()

    @contextlib.contextmanager
    def exclusive(self, *, blocking: bool = True) -> Iterator[bool]:
        """Hold the engine's lock, and retire ended requests at the beginning and the end. Without ``blocking`` yield
        False if another thread holds it."""
        with deferred_interrupts(), engine_stream(self._device):
            if not self._lock.acquire(blocking):
                yield False
                return
            self._acquired += 1
            self._owner = threading.get_ident()
            try:
                self._retire_ended()
                yield True
                self._retire_ended()
            finally:
                interrupt = self._retirement.take_interrupt()
                if self._on_host and (self._waiting_threads or self._is_empty):
                    # The next step may run in another thread.
                    release_workers()
                self._owner = None
                self._lock.release()
                with self.changed:
                    self._released += 1
                    self.changed.notify_all()
                    self._ended.extend(request for request in self.readers.wake() if request.end("cancelled"))
                self.clean_up()
            if interrupt is not None:
                raise interrupt

    @contextlib.contextmanager
    def while_building(self, *, exclusive: bool) -> Iterator[None]:
        """The context of a build, in any thread. With ``exclusive`` no other thread steps meanwhile."""
        exclusive = exclusive and not self.holds_lock
        with self.exclusive() if exclusive else contextlib.nullcontext():
            yield
        if not exclusive and self._on_host:
            # The next step may run in another thread.
            release_workers()

    # --- requests ------------------------------------------------------------------------------------

    def enqueue(self, requests: list[Request]) -> None:
        """Queue all requests, or none.

        Raises:
            QueueFull, Closed.
        """
        with deferred_interrupts(), self.changed:
            if self.closed:
                raise self.closed_error()
            self.end_abandoned()
            self._waiting.push(requests, self._slots.free)
            self.changed.notify_all()

    def ended(self, request: Request) -> None:
        """Retire ``request``, which ended outside of a step."""
        self._waiting.remove(request)
        self._ended.append(request)
        self.clean_up()

    def abandoned(self, request: Request) -> None:
        """Record that the last reader of ``request`` is gone. Finalizers call this, so it acquires no lock."""
        self._abandoned.append(request)

    def end_abandoned(self) -> None:
        """Remove abandoned requests from the queue. The next holder of the lock releases their slots."""
        while self._abandoned:
            request = self._abandoned.popleft()
            request.end("cancelled")
            self._waiting.remove(request)
            self._ended.append(request)

    def clean_up(self) -> None:
        """Retire requests that ended outside of a step: now, or when the current holder releases the lock."""
        if self._ended:
            with self.exclusive(blocking=False):
                pass

    def _retire_ended(self) -> None:
        while True:
            self.end_abandoned()
            if self.closed:
                left = [*self._waiting.drain(), *self._slots.owned]
                self._ended.extend(request for request in left if request.end("cancelled"))
            if not self._ended:
                return
            self._retirement.retire([self._ended.popleft()])

    # --- the end -------------------------------------------------------------------------------------

    def after_fork(self) -> None:
        """Adapt to a forked child, which lacks the threads that held locks, served or stepped for readers."""
        if not self._on_host:
            self._forked = f"its state is on {self._device}, which a forked process cannot use"
        elif self._saves:
            self._forked = "it saves hidden states, and both processes would write the same files"
        elif self._lock.locked():
            self._forked = "a step was running when the process was forked, so its state is incomplete"
        self._lock, self.changed = threading.Lock(), threading.Condition()
        self._owner, self._waiting_threads = None, 0
        self._servers.clear()
        self.readers.clear()
        for request in [*self._waiting.after_fork(), *self._slots.owned]:
            request.after_fork()

    @property
    def forked(self) -> bool:
        """Whether this process was forked and cannot step."""
        return bool(self._forked)

    def check_process(self) -> None:
        """Check that this process can step.

        Raises:
            ForkedSpeculator: it cannot, since it was forked.
        """
        if self._forked:
            raise ForkedSpeculator(reason=self._forked)

    def close(self) -> None:
        """Cancel all requests, accept no more, and wait until other threads have left :meth:`serving`. A thread that
        still runs when the interpreter ends could crash the process."""
        with self.changed:
            self.closed = True
        # In a callback, the current step retires the requests when it ends.
        if self.forked or self.holds_lock:
            return
        with self.exclusive():
            pass
        me = threading.get_ident()
        with self.changed:
            self.changed.wait_for(lambda: not self._servers - {me})

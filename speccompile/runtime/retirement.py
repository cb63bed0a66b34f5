"""Retirement of requests: their errors, and the release of their rows and slots."""

from __future__ import annotations

from typing import Protocol

from speccompile.runtime.batch import Batch
from speccompile.runtime.request import Request, as_exception
from speccompile.runtime.slots import Slots
from speccompile.runtime.stats import Stats


class Keeper(Protocol):
    """Keeps data of sequences that have ended."""

    def end(self, request: Request) -> None:
        """Keep data of ``request``, which still has its slot. Called once."""


class Retirement:
    """Ends requests. An error of one request only ends that request.

    Args:
        unread: lets the drafter read the whole sequence, whose KV stays; None if it has.

    Attributes:
        keeper: keeps hidden states of sequences; None if they are not kept.
    """

    def __init__(
        self, batch: Batch, slots: Slots, stats: Stats, keeper: Keeper | None, unread: Keeper | None = None
    ) -> None:
        self._batch = batch
        self._slots = slots
        self._stats = stats
        self.keeper = keeper
        self._unread = unread
        self._interrupt: BaseException | None = None

    def take_interrupt(self) -> BaseException | None:
        """Return once the interrupt (``KeyboardInterrupt``) that a callback raised. It is raised after the step."""
        interrupt, self._interrupt = self._interrupt, None
        return interrupt

    def fail_one(self, request: Request, error: BaseException) -> None:
        """End ``request`` with ``error``. An error that is not an ``Exception`` is also stored for
        :meth:`take_interrupt`."""
        request.end("error", as_exception(error))
        if not isinstance(error, Exception):
            self._interrupt = error

    def fail_all(self, requests: list[Request], error: BaseException) -> None:
        """End all of ``requests`` with ``error``, and release their rows and slots."""
        for request in requests:
            self.fail_one(request, error)
        self.retire(requests)

    def retire(self, requests: list[Request]) -> None:
        """Release the rows and slots of those ``requests`` that have ended, and close them. Each is closed once. A
        request that is cancelled within a step is passed twice: as a row and as a cancelled request."""
        ended = [request for request in requests if request.finished and not request.closed]
        for request in ended:
            self._batch.remove(request)
            for keeper in (self._unread, self.keeper):
                if keeper is None:
                    continue
                # An interrupt is also caught, so the slot is released.
                try:
                    keeper.end(request)
                except BaseException as error:
                    self.fail_one(request, error)
            if request in self._slots.owned:
                self._slots.release(request)
        if ended:
            self._batch.bind()
        for request in ended:
            self._stats.count_request(request.stats)
            try:
                request.close()
            except BaseException as error:
                self.fail_one(request, error)

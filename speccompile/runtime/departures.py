"""How requests leave: with what error, and what they give back."""

from __future__ import annotations

from speccompile.runtime.batch import Batch
from speccompile.runtime.request import Request, as_exception
from speccompile.runtime.saver import Saver
from speccompile.runtime.slots import Slots
from speccompile.runtime.stats import Stats


class Departures:
    """Ends requests. What is wrong with one of them ends that one alone, whatever it was.

    Args:
        saver: saves hidden states of sequences; None if they are not saved.
    """

    def __init__(self, batch: Batch, slots: Slots, stats: Stats, saver: Saver | None) -> None:
        self._batch = batch
        self._slots = slots
        self._stats = stats
        self._saver = saver
        self._interrupt: BaseException | None = None

    def take_interrupt(self) -> BaseException | None:
        """The wish to stop everything (``KeyboardInterrupt``) that came up in a callback, once; it is raised when the
        step is in order."""
        interrupt, self._interrupt = self._interrupt, None
        return interrupt

    def blame(self, request: Request, error: BaseException) -> None:
        """End ``request`` with ``error``. What is not an ``Exception`` is kept for :meth:`take_interrupt`, too."""
        request.end("error", as_exception(error))
        if not isinstance(error, Exception):
            self._interrupt = error

    def fail(self, requests: list[Request], error: BaseException) -> None:
        """End all of ``requests`` with ``error``, and take back what they own."""
        for request in requests:
            self.blame(request, error)
        self.retire(requests)

    def retire(self, requests: list[Request]) -> None:
        """Take those of ``requests`` that have ended out of their rows and slots, and close them: each once, though one
        that is cancelled within a step ends both as a row of it and as a cancelled request."""
        ended = [request for request in requests if request.finished and not request.closed]
        for request in ended:
            self._batch.remove(request)
            if self._saver is not None:
                # Its slot is given back also when the error is an interrupt.
                try:
                    self._saver.end(request)
                except BaseException as error:
                    self.blame(request, error)
            if request in self._slots.owned:
                self._slots.give_back(request)
        if ended:
            self._batch.bind()
        for request in ended:
            self._stats.count_request(request.stats)
            try:
                request.close()
            except BaseException as error:
                self.blame(request, error)

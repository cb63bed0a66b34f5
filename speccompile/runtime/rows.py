"""Rows: the requests that decode, what they are handed, and how they end."""

from __future__ import annotations

from collections.abc import Callable, Hashable

from speccompile.errors import UndecidedLogits
from speccompile.graph.arena import Arena
from speccompile.graph.keys import KINDS, Kind
from speccompile.runtime.request import Request, as_exception
from speccompile.runtime.saver import Saver
from speccompile.runtime.score_records import Record
from speccompile.runtime.slots import Slots
from speccompile.runtime.stats import Stats
from speccompile.sampling.allowed import ask


class Rows:
    """Requests with a slot; those whose prompt has been read are rows of the next step.

    What is wrong with one of them ends that one alone, whatever it was.

    Args:
        arena: state of all slots.
        state_of_weights: differs from before when the weights were changed.
        prefix_reuse: a text's KV serves those that begin like it.
        reads_dead_places: attention also reads places of a slot that its text has not reached, and hides them.
        saver: saves hidden states of texts; None if nobody does.
    """

    def __init__(
        self,
        arena: Arena,
        state_of_weights: Callable[[], Hashable],
        *,
        prefix_reuse: bool,
        reads_dead_places: bool,
        saver: Saver | None,
    ) -> None:
        self.arena = arena
        self.stats = Stats(arena.layout.max_draft_len)
        self.prefix_reuse = prefix_reuse
        self.saver = saver
        self.slots = Slots(arena, state_of_weights, reuse=prefix_reuse, clear=reads_dead_places)
        self._rows: list[Request] = []
        # Rows whose drafts made their logits NaN: they go on without.
        self._stuck: set[Request] = set()
        self._prefilling: Request | None = None
        # A wish to stop everything that came up in somebody's callback, to be raised when the step is in order.
        self._interrupt: BaseException | None = None

    @property
    def running(self) -> list[Request]:
        """Requests that own a slot."""
        return self.slots.owned

    def _kind_of_rows(self) -> Kind:
        return max((request.params.kind for request in self._rows), key=KINDS.index, default="greedy")

    def _join(self, request: Request) -> None:
        self._prefilling = None
        self._rows.append(request)
        self._bind_rows()

    def _ask(self, request: Request) -> None:
        """Write into its slot which tokens the host allows next, or what the step calls on the host. What fails there
        is its own failure."""
        sampling, layout = request.params.sampling, self.arena.layout
        if sampling is None:
            return
        if sampling.host_call is not None:
            self.arena.write("host_call", request.slot, sampling.host_call.number)
        if sampling.asks is None:
            return
        try:
            allowed = ask(sampling.asks, sampling.row, request.prompt + request.new_tokens, layout.vocab_size)
            self.arena.write("allowed_tokens", request.slot, allowed)
        except BaseException as error:
            self._fail([request], error)

    def _hand_out(self, request: Request, new: list[int], alive: bool, record: Record) -> None:
        had = len(request.new_tokens)
        request.cached = len(request.prompt) + had + len(new) - 1
        try:
            request.records.add(record, len(new))
            self._tell(request, new)
        except BaseException as error:
            self._blame(request, error)
        if added := len(request.new_tokens) - had:
            seconds, first = request.lap()
            self.stats.count_tokens(added, seconds, first=first)
        if not alive:
            self._end(request)

    def _tell(self, request: Request, new: list[int]) -> None:
        listener = request.listener
        if listener.deaf:
            request.add(new)
            return
        for token in new:
            if not request.add([token]):
                return
            if listener.hear(token):
                request.end("stop")

    def _end(self, request: Request) -> None:
        """The graph has ended this row; say why."""
        text, new = len(request.prompt) + len(request.new_tokens), request.new_tokens
        if request.host_error is not None:
            self._blame(request, request.host_error)
        elif new and new[-1] in request.params.eos:
            request.end("eos")
        elif len(new) == request.params.max_new_tokens:
            request.end("max_new_tokens")
        elif text == self.arena.layout.max_len:
            request.end("max_len")
        else:
            request.end("error", UndecidedLogits(position=text))

    # --- ends ----------------------------------------------------------------------------------------

    def _blame(self, request: Request, error: BaseException) -> None:
        """It ends with ``error``. What is no fault but the wish to stop everything is kept, too, for the step's end."""
        request.end("error", as_exception(error))
        if not isinstance(error, Exception):
            self._interrupt = error

    def _fail(self, requests: list[Request], error: BaseException) -> None:
        """All of these end with ``error``, and let go of what they own."""
        for request in requests:
            self._blame(request, error)
        self._retire(requests)

    def _retire(self, requests: list[Request]) -> None:
        """Take those that have ended out of their rows and slots, and tell their listeners: once, though one that is
        cancelled in the middle of a step ends both as a row of it and as a request that somebody cancelled."""
        ended = [request for request in requests if request.finished and not request.closed]
        for request in ended:
            if request is self._prefilling:
                self._prefilling = None
            if request in self._rows:
                self._rows.remove(request)
            self._stuck.discard(request)
            if self.saver is not None:
                # Its slot goes to others also when somebody wants to stop everything.
                try:
                    self.saver.end(request)
                except BaseException as error:
                    self._blame(request, error)
            if request in self.slots.owned:
                self.slots.give_back(request)
        if ended:
            self._bind_rows()
        for request in ended:
            self.stats.count_request(request.stats)
            try:
                request.close()
            except BaseException as error:
                self._blame(request, error)

    def _bind_rows(self) -> None:
        slots = [request.slot for request in self._rows]
        slots += [self.arena.layout.dummy_slot] * (self.arena.layout.max_batch - len(slots))
        self.arena.write("slots", slice(None), slots)

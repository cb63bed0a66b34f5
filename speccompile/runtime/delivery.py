"""Passes new tokens from a step to the request, its streamer and its stopping criteria."""

from __future__ import annotations

from speccompile.errors import UndecidedLogits
from speccompile.runtime.departures import Departures
from speccompile.runtime.request import Request
from speccompile.runtime.score_records import Record
from speccompile.runtime.stats import Stats


class Delivery:
    """Delivers tokens to requests. An error of a callback ends its request alone.

    Args:
        max_len: most tokens of a sequence.
    """

    def __init__(self, departures: Departures, stats: Stats, max_len: int) -> None:
        self._departures = departures
        self._stats = stats
        self._max_len = max_len

    def deliver(
        self, request: Request, new: list[int], alive: bool, record: Record, accepted: int = 0, source: int = 0
    ) -> None:
        """Add the ``new`` tokens to ``request``, and end it unless its row is ``alive``. The first ``accepted`` of them
        are accepted drafts of the drafter ``source``."""
        had = len(request.new_tokens)
        request.cached = len(request.prompt) + had + len(new) - 1
        try:
            request.records.add(record, len(new))
            self._add(request, new, accepted, source)
        except BaseException as error:
            self._departures.fail_one(request, error)
        if added := len(request.new_tokens) - had:
            seconds, first = request.note_token()
            self._stats.count_tokens(added, seconds, first=first)
        if not alive:
            self._end(request)

    @staticmethod
    def _add(request: Request, new: list[int], accepted: int, source: int) -> None:
        listener = request.listener
        if listener.is_silent:
            request.add(new, accepted, source)
            return
        for index, token in enumerate(new):
            if not request.add([token], int(index < accepted), source):
                return
            if listener.notify(token):
                request.end("stop")

    def _end(self, request: Request) -> None:
        """End a request whose row the graph has ended, with the reason."""
        length, new = len(request.prompt) + len(request.new_tokens), request.new_tokens
        if request.host_error is not None:
            self._departures.fail_one(request, request.host_error)
        elif new and new[-1] in request.params.eos:
            request.end("eos")
        elif len(new) == request.params.max_new_tokens:
            request.end("max_new_tokens")
        elif length == self._max_len:
            request.end("max_len")
        else:
            request.end("error", UndecidedLogits(position=length))

"""Delivery of new tokens from a step to the request, its streamer and its stopping criteria."""

from __future__ import annotations

from dataclasses import dataclass

from speccompile.errors import UndecidedLogits
from speccompile.runtime.request import Request
from speccompile.runtime.retirement import Retirement
from speccompile.runtime.score_records import Record
from speccompile.runtime.stats import GUIDE_SOURCE, Stats


@dataclass(frozen=True)
class Judgement:
    """The result of a row's draft tokens in one step.

    Args:
        accepted, proposed: numbers of draft tokens.
        depth: depth of the deepest draft token of a tree; None for a chain.
        source: the drafter, by its index in ``Mode.drafter_names``. Drafts of a chain that a guide forces count as
            ``GUIDE_SOURCE``, also if a drafter had proposed them.
    """

    accepted: int
    proposed: int
    depth: int | None = None
    source: int = 0


class Delivery:
    """Delivers tokens to requests. An error of a callback only ends its own request.

    Args:
        max_len: most tokens of a sequence.
    """

    def __init__(self, retirement: Retirement, stats: Stats, max_len: int) -> None:
        self._retirement = retirement
        self._stats = stats
        self._max_len = max_len

    def deliver(
        self, request: Request, new: list[int], alive: bool, record: Record, judgement: Judgement | None = None
    ) -> None:
        """Add the ``new`` tokens to ``request``, up to the one after which its listener ends it. End the request if its
        row is not ``alive``. The first ``judgement.accepted`` tokens are accepted drafts. The token after a
        prompt's chunk has no ``judgement``."""
        had = len(request.new_tokens)
        request.cached = len(request.prompt) + had + len(new) - 1
        stops, failure = False, None
        try:
            request.records.add(record, len(new))
            stops = self._add(request, new, judgement)
        except BaseException as error:
            failure = error
        # Counted before the request ends, since a waiting thread may read the counts at once.
        self._count(request, len(request.new_tokens) - had, judgement)
        if failure is not None:
            self._retirement.fail_one(request, failure)
        if stops:
            request.end("stop")
        if not alive:
            self._end(request)

    @staticmethod
    def _add(request: Request, new: list[int], judgement: Judgement | None) -> bool:
        """Add tokens. Return whether the request's listener ends it; no token after that one is added."""
        sources: list[int] = []
        if judgement is not None:
            accepted = min(judgement.accepted, len(new))
            forced = min(accepted, Delivery._forced(request, judgement, len(request.new_tokens)))
            sources = [GUIDE_SOURCE] * forced + [judgement.source] * (accepted - forced)
        listener = request.listener
        if listener.is_silent:
            request.add(new, sources)
            return False
        for index, token in enumerate(new):
            if not request.add([token], sources[index : index + 1]):
                return False
            if listener.notify(token):
                return True
        return False

    @staticmethod
    def _forced(request: Request, judgement: Judgement, index: int) -> int:
        """Return the number of drafts from new token ``index`` on that the guide forces. It adds none to a tree."""
        return 0 if judgement.depth is not None else request.forced_drafts(index, judgement.proposed)

    def _count(self, request: Request, added: int, judgement: Judgement | None) -> None:
        """Count the ``added`` tokens. Accepted drafts after the request's end are not in its sequence, and are not
        counted as accepted."""
        if added:
            seconds, first = request.note_token()
            self._stats.count_tokens(added, seconds, first=first)
        if judgement is None:
            return
        accepted = min(judgement.accepted, added)
        for counters in (self._stats, request.stats):
            counters.count(added, accepted, judgement.proposed, judgement.depth)
        forced = self._forced(request, judgement, len(request.new_tokens) - added)
        accepted_forced = min(accepted, forced)
        if forced:
            request.stats.count_drafts(GUIDE_SOURCE, accepted_forced, forced)
        request.stats.count_drafts(judgement.source, accepted - accepted_forced, judgement.proposed - forced)

    def _end(self, request: Request) -> None:
        """End a request whose row the step has ended, with the reason."""
        length, new = len(request.prompt) + len(request.new_tokens), request.new_tokens
        if request.host_error is not None:
            self._retirement.fail_one(request, request.host_error)
        elif new and new[-1] in request.params.eos:
            request.end("eos")
        elif len(new) == request.params.max_new_tokens:
            request.end("max_new_tokens")
        elif length == self._max_len:
            request.end("max_len")
        else:
            request.end("error", UndecidedLogits(position=length))

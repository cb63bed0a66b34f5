"""Prompts: waiting requests get slots, and their prompts are processed in chunks or along with decode steps."""

from __future__ import annotations

from functools import partial

from speccompile.graph.arena import Arena
from speccompile.graph.keys import ChunkKind
from speccompile.multimodal.model_inputs import EMBEDDED
from speccompile.multimodal.source import SourceFeatures
from speccompile.runtime.batch import Batch
from speccompile.runtime.chunk_features import ChunkFeatures
from speccompile.runtime.delivery import Delivery
from speccompile.runtime.host_calls import HostCalls
from speccompile.runtime.outcomes import Columns, Outcomes
from speccompile.runtime.prefill import PrefillBudget
from speccompile.runtime.reading_order import ReadingOrder
from speccompile.runtime.request import Request
from speccompile.runtime.retirement import Retirement
from speccompile.runtime.slots import Slots
from speccompile.runtime.stats import Stats
from speccompile.runtime.tier_table import TierTable
from speccompile.runtime.timing import Clock
from speccompile.runtime.unread_tokens import UnreadTokens
from speccompile.runtime.waiting import WaitingQueue


class PromptReader:
    """Processes prompts piece by piece, between decode steps within a budget, or along with them. For each piece
    :class:`~speccompile.runtime.reading_order.ReadingOrder` chooses the request.

    Args:
        host_calls: calls on the host for the first new token.
        outcomes: results of the last chunk of a prompt.
        budget: the number of tokens between two steps; it measures chunks and steps.
        clock: times chunks.
        unread: lets the drafter read what only the target has read; None if every step updates the drafter.
    """

    def __init__(
        self,
        arena: Arena,
        table: TierTable,
        batch: Batch,
        slots: Slots,
        waiting: WaitingQueue,
        retirement: Retirement,
        delivery: Delivery,
        host_calls: HostCalls,
        outcomes: Outcomes,
        stats: Stats,
        budget: PrefillBudget,
        clock: Clock,
        unread: UnreadTokens | None = None,
    ) -> None:
        self._arena = arena
        self._unread = unread
        self._table = table
        self._batch = batch
        self._slots = slots
        self._waiting = waiting
        self._retirement = retirement
        self._delivery = delivery
        self._host_calls = host_calls
        self._outcomes = outcomes
        self._stats = stats
        self._clock = clock
        self._columns = Columns.of(arena)
        self._order = ReadingOrder(slots)
        self._features = ChunkFeatures(arena) if EMBEDDED in arena else None
        self._along: Request | None = None
        self.budget = budget

    def read(self) -> bool:
        """Give slots to waiting requests and process their prompts. Return whether a chunk has run that goes before the
        next step."""
        spent: list[int] = []
        self._along = None
        while (request := self._next()) is not None:
            if self.reads_along(request):
                if request.cached == request.length - 1:
                    self._join_known(request)
                    continue
                self._along = request
                return False
            goes_first = self._batch.goes_first(request)
            width = self._chunk(request, None if goes_first else spent)
            if width is None:
                return False
            if width and goes_first:
                return True
            if width:
                spent.append(width)
        return False

    @property
    def along(self) -> Request | None:
        """The request whose prompt the next step also processes; None without one, or if it was cancelled meanwhile."""
        request = self._along
        return request if request is not None and request.slot >= 0 and self.reads_along(request) else None

    def reads_along(self, request: Request) -> bool:
        """Whether the next decode step also processes the prompt of ``request``, except for its last token. The
        request's own first decode step processes that token."""
        return (
            not request.finished
            and not self._batch.goes_first(request)
            and not request.params.outputs.prompt_logprobs
            and (request.params.features is None or not request.params.features.in_chunks)
            and self.budget.mixes
            and self._table.mixes(self._batch.kind)
        )

    def point_at(self, request: Request) -> None:
        """Let the next run continue the prompt of ``request``."""
        self._arena.write("prefill_slot", 0, request.slot)
        self._arena.write("prefill_start", 0, request.cached)

    def count_along(self, request: Request, most: int) -> None:
        """Count the prompt tokens of ``request`` that a step has also processed, at most ``most``."""
        left = request.length - 1 - request.cached
        count = min(most, left)
        self._stats.prefill_tokens += count
        self._count_read(request, count)
        self._order.note(request)
        if count == left:
            self._join_without_token(request)

    def _join_known(self, request: Request) -> None:
        """Turn ``request``, of whose prompt only the last token is left, into a row without a piece."""
        # Its slot counts as its client's turn. Otherwise a client that repeats one prompt would get all free slots.
        self._order.note(request)
        self._join_without_token(request)

    def _join_without_token(self, request: Request) -> None:
        """Turn ``request`` into a row with KV of all but the newest token, as after a decode step. Its first decode
        step processes that token."""
        if self._columns.proposes and request.stats.prefill_tokens and not request.new_tokens:
            # Chunks also propose drafts.
            request.proposal = self._columns.proposal(self._outcomes.take().read(), request.slot)
        self._batch.join(request)

    def _next(self) -> Request | None:
        """Return the request whose prompt is processed next, with a slot. A waiting request is chosen only if a slot is
        free. If its KV does not fit, no other request overtakes it, and the prompts that have a slot are processed."""
        readers, fits = self._batch.readers, True
        while True:
            waiting = self._waiting.requests if fits and self._slots.free else ()
            request = self._order.choose(readers, waiting)
            if request is None or request in readers:
                return request
            fits = self._slots.fits(request)
            if fits and self._waiting.remove(request) and self._admit(request):
                return request

    def _admit(self, request: Request) -> bool:
        """Give a free slot to ``request``. Return False if that failed."""
        again = request.admitted
        try:
            self._slots.take(request)
            if not again:
                request.listener.start()
        except BaseException as error:
            self._retirement.fail_all([request], error)
            return False
        self._batch.readers.append(request)
        if again:
            self._stats.reread_tokens += request.length - request.cached
            return True
        self._stats.prompt_tokens += request.stats.prompt_tokens
        self._stats.reused_tokens += request.stats.reused_tokens
        self._stats.reread_tokens += request.stats.reread_tokens
        return True

    def stop(self, request: Request) -> None:
        """Free the slot of ``request``, which has not ended, and let it wait for another one."""
        if self._unread is not None:
            self._unread.end(request)
        self._batch.remove(request)
        self._slots.stop(request)
        self._stats.preemptions += 1
        self._batch.bind()
        self._waiting.put_back(request)
        if request.finished:
            # It was cancelled meanwhile, and was not in the queue then.
            self._waiting.remove(request)

    def _chunk(self, request: Request, spent: list[int] | None) -> int | None:
        """Run a chunk of the prompt of ``request``. An error only ends that request.

        Returns:
            The chunk's width; 0 if all tokens were known, None if the budget allows no chunk before the next step.
        """
        try:
            left = request.length - request.cached
            if left == 1 and (request.stats.reused_tokens or request.new_tokens) and request.decodes_last:
                self._join_known(request)
                return 0
            # A chunk with the last token chooses the first new one.
            left -= bool(request.new_tokens)
            width = self.budget.next_chunk(left, spent)
            if width is None:
                return None
            self._run_chunk(request, width, min(width, left))
            return width
        except BaseException as error:
            self._retirement.fail_all([request], error)
            return 0

    def _run_chunk(self, request: Request, width: int, count: int) -> None:
        arena, is_last = self._arena, request.cached + count == request.length
        if is_last:
            self._host_calls.ask(request, drafts=False)
            if request.finished:
                return
        self.point_at(request)
        if self._features is not None:
            features = request.params.features
            # Only a model without an encoder has chunks with inputs.
            assert not isinstance(features, SourceFeatures)
            self._features.write(features, request.cached, width)
        kind = _kind_of_chunk(request, is_last)
        # Scored chunks run the lm_head over all positions, so their time does not estimate that of other chunks.
        note = partial(self.budget.note_chunk, width) if kind != "prompt_scored" else lambda _: None
        with self._clock.time(note):
            self._table.prefill[width, kind].run()
        self._order.note(request)
        self._stats.count_prefill(count)
        self._slots.save_checkpoint(request)
        if kind == "prompt_scored":
            followed = min(count, len(request.prompt) - 1 - request.cached)
            request.records.read_prompt(arena, followed)
        self._count_read(request, count)
        if is_last:
            self._batch.join(request)
            record = request.records.read(arena, request.slot, 1)
            columns = self._outcomes.take().read()
            request.proposal = self._columns.proposal(columns, request.slot)
            emitted, _, _, alive, *newest = (column[request.slot] for column in columns)
            self._delivery.deliver(request, newest[:emitted], bool(alive), record)
            self._retirement.retire([request])

    @staticmethod
    def _count_read(request: Request, count: int) -> None:
        if not request.new_tokens:
            request.stats.prefill_tokens += count
        request.cached += count


def _kind_of_chunk(request: Request, is_last: bool) -> ChunkKind:
    if request.params.outputs.prompt_logprobs and not request.new_tokens:
        return "prompt_scored"
    return request.params.kind if is_last else "inner"

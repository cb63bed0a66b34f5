"""Prompts: waiting requests get slots, and what they ask is read in chunks or along with decode steps."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from functools import partial

from speccompile.graph.arena import Arena
from speccompile.graph.keys import ChunkKind, TierName
from speccompile.lowering.tier import Tier
from speccompile.runtime.options import EngineOptions
from speccompile.runtime.outcomes import Outcomes
from speccompile.runtime.prefill import PrefillBudget
from speccompile.runtime.request import Request
from speccompile.runtime.rows import Rows
from speccompile.runtime.saver import Saver
from speccompile.runtime.timing import clock_of
from speccompile.runtime.waiting import WaitingQueue


class Prompts(Rows):
    """One prompt is read at a time, between decode steps within a budget, or along with them.

    Args:
        prefill_tiers: what reads chunks.
        outcomes: what runs tell the host.
        options: of the engine.
        one_shape: all steps and chunks run one shape, so that a text depends in no bit on what else ran.
    """

    def __init__(
        self,
        arena: Arena,
        state_of_weights: Callable[[], Hashable],
        prefill_tiers: Mapping[tuple[int, ChunkKind], Tier],
        outcomes: Outcomes,
        options: EngineOptions,
        *,
        one_shape: bool,
        reads_dead_places: bool,
        saver: Saver | None,
    ) -> None:
        # KV of a decode step and of a prompt chunk differ in their last bits.
        reuse = options.prefix_reuse and not one_shape
        super().__init__(arena, state_of_weights, prefix_reuse=reuse, reads_dead_places=reads_dead_places, saver=saver)
        self.prefill_tiers = dict(sorted(prefill_tiers.items()))
        self.mixed_tiers: dict[TierName, Tier] = {}
        self.outcomes = outcomes
        self.options = options
        self.clock = clock_of(arena.device)
        self.waiting = WaitingQueue(options.max_waiting)
        widths = sorted({width for width, _ in self.prefill_tiers})
        self.prefill_budget = PrefillBudget(widths, options.prefill_budget, fixed=one_shape)

    def _admit(self) -> Request | None:
        """The next waiting request that has not been cancelled meanwhile, with a slot, if one is free."""
        while self.slots.free and (request := self.waiting.pop()) is not None:
            if request.finished:
                continue
            try:
                self.slots.take(request)
                request.listener.start()
            except BaseException as error:
                self._fail([request], error)
                continue
            self.stats.reused_tokens += request.cached
            self._prefilling = request
            return request
        return None

    def _prefill(self) -> bool:
        """Give slots to waiting requests and read their prompts; true if prompts go first and a chunk has run."""
        spent: list[int] = []
        while True:
            request = self._prefilling or self._admit()
            if request is None:
                return False
            if self._reads_along(request):
                if request.cached == len(request.prompt) - 1:
                    self._join(request)
                    continue
                return False
            unwatched = self._unwatched(request)
            width = self._chunk(request, None if unwatched else spent)
            if width is None:
                return False
            if width and unwatched:
                return True
            if width:
                spent.append(width)

    def _unwatched(self, request: Request) -> bool:
        return not self._rows or (request.params.patient and all(row.params.patient for row in self._rows))

    def _reads_along(self, request: Request) -> bool:
        """Its prompt is read along with the next decode step, all but the last token: that is the first which a decode
        step of its own reads."""
        return (
            not request.finished
            and not self._unwatched(request)
            and not request.params.wanted.prompt_logprobs
            and self.prefill_budget.mixes
            and self._kind_of_rows() in {kind for *_, kind in self.mixed_tiers}
        )

    def _chunk(self, request: Request, spent: list[int] | None) -> int | None:
        """Read a chunk of a request's prompt and return its width: 0 if there was nothing to read, None if there was no
        room for it before the next decode step. What fails here is that request's own failure."""
        if request.finished:
            # Cancelled by what it asked: it lets go of its slot when the turn ends.
            return None
        try:
            left = len(request.prompt) - request.cached
            if request.stats.reused_tokens and left == 1:
                # As after a decode step: KV of all but the newest token. The next one does the rest.
                self._join(request)
                return 0
            width = self.prefill_budget.next_chunk(left, spent)
            if width is None:
                return None
            self._run_chunk(request, width, min(width, left))
            return width
        except BaseException as error:
            self._fail([request], error)
            return 0

    def _run_chunk(self, request: Request, width: int, count: int) -> None:
        arena, is_last = self.arena, request.cached + count == len(request.prompt)
        if is_last:
            self._ask(request)
            if request.finished:
                return
        self._point_at(request)
        kind = self._kind_of_chunk(request, is_last)
        # Scored ones run the lm_head over all places, and say nothing of others.
        note = partial(self.prefill_budget.note_chunk, width) if kind != "prompt_scored" else lambda _: None
        with self.clock.time(note):
            self.prefill_tiers[width, kind].run()
        self.stats.count_prefill(count)
        if request.params.wanted.prompt_logprobs:
            followed = min(count, len(request.prompt) - 1 - request.cached)
            request.records.add_prompt(arena["chunk_logprobs"][:followed].tolist())
        self._count_read(request, count)
        if is_last:
            self._join(request)
            record = request.records.look(request.slot, 1)
            emitted, _, _, alive, *newest = (column[request.slot] for column in self.outcomes.take().read())
            self._hand_out(request, newest[:emitted], bool(alive), record)
            self._retire([request])

    def _point_at(self, request: Request) -> None:
        """The next run reads its prompt on."""
        self.arena.write("prefill_slot", 0, request.slot)
        self.arena.write("prefill_start", 0, request.cached)

    @staticmethod
    def _count_read(request: Request, count: int) -> None:
        request.stats.prefill_tokens += count
        request.cached += count

    def _kind_of_chunk(self, request: Request, is_last: bool) -> ChunkKind:
        if request.params.wanted.prompt_logprobs:
            return "prompt_scored"
        return request.params.kind if is_last else "inner"

    def _read_along(self, reader: Request, most: int) -> None:
        """A step has read up to ``most`` tokens on in its prompt."""
        left = len(reader.prompt) - 1 - reader.cached
        count = min(most, left)
        self.stats.prefill_tokens += count
        self._count_read(reader, count)
        if count == left:
            self._join(reader)

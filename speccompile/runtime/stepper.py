"""What one step does: prompts are read, a tier runs over the rows, its results are handed out.

One thread at a time; :class:`~speccompile.runtime.engine.Engine` sees to that.
"""

from __future__ import annotations

import time
import weakref
from collections import deque
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from functools import partial

from speccompile.graph.arena import Arena
from speccompile.graph.keys import Kind, TierName
from speccompile.lowering.tier import Executables, Tier
from speccompile.modes.base import HostDraft
from speccompile.policies.base import AnyPolicy, Row
from speccompile.runtime.host_drafter import HostDrafter
from speccompile.runtime.measure import measure_tiers
from speccompile.runtime.options import EngineOptions
from speccompile.runtime.outcomes import Outcome, Outcomes
from speccompile.runtime.policy_controller import Policies
from speccompile.runtime.policy_inputs import done_of, policy_rows
from speccompile.runtime.prompts import Prompts
from speccompile.runtime.request import Request
from speccompile.runtime.saver import Saver
from speccompile.runtime.score_records import Record
from speccompile.utils.build_lock import one_build


@dataclass(frozen=True)
class Flight:
    """A run whose results have not been read yet.

    ``outcome`` and ``records``, of the rows that want any, are copies, since the next run overwrites the arena.
    ``offered`` is what the policy was told of each row, ``started`` when the run began, and a ``mixed`` one read a
    prompt along.
    """

    rows: list[Request]
    outcome: Outcome
    records: dict[Request, Record]
    offered: list[Row]
    draft_len: int
    started: float
    mixed: bool


class Stepper(Prompts):
    """Chooses and runs tiers; every change of tier is one assignment to :attr:`tier`.

    Args:
        arena: state of all slots.
        executables: what requests run that ask for nothing.
        make: makes those of another kind, when the first request needs them.
        make_mixed: makes the mixed tiers of a kind, when the first request is submitted whose tokens are watched.
        policy: chooses the draft length of each step.
        outcomes: what runs tell the host.
        ready: the drafter's proposals are in the arena when a step ends, so the smallest tier that serves them runs.
        options: of the engine.
        one_shape: all steps and chunks run one shape, so that a text depends in no bit on what else ran.
        reads_dead_places: attention also reads places of a slot that its text has not reached, and hides them.
        parks: executables run once over the arena when they are made (CUDA graphs), so that no step may run meanwhile.
        host_draft: a drafter on the host, asked in front of each step.
        reach: most tokens of a text that the mode's own network reads; None is all of it.
        saver: saves hidden states of texts; None if nobody does.
        state_of_weights: differs from before when the weights were changed.
    """

    def __init__(
        self,
        arena: Arena,
        executables: Executables,
        make: Callable[[Kind], Executables],
        make_mixed: Callable[[Kind], Mapping[TierName, Tier]],
        policy: AnyPolicy,
        outcomes: Outcomes,
        *,
        ready: bool,
        options: EngineOptions,
        one_shape: bool,
        reads_dead_places: bool,
        state_of_weights: Callable[[], Hashable],
        parks: bool = False,
        host_draft: HostDraft | None = None,
        reach: int | None = None,
        saver: Saver | None = None,
    ) -> None:
        super().__init__(
            arena,
            state_of_weights,
            executables.prefill,
            outcomes,
            options,
            one_shape=one_shape,
            reads_dead_places=reads_dead_places,
            saver=saver,
        )
        self.tiers = dict(sorted(executables.tiers.items()))
        self._make, self._make_mixed = make, make_mixed
        self._mixed_kinds: set[Kind] = set()
        self._parks = parks
        self.ready = ready
        self.draft_lens = tuple(sorted({draft_len for draft_len, _, _ in self.tiers}))
        self.row_counts = tuple(sorted({rows for _, rows, _ in self.tiers}))
        # Not self: an engine that refers to itself keeps its tensors until Python's collector comes by.
        me = weakref.proxy(self)
        self.policies = Policies(policy, self.draft_lens, ready=ready, measure=lambda: measure_tiers(arena, me.tiers))
        self.tier = next(iter(self.tiers.values()))
        self.host_drafter = None if host_draft is None else HostDrafter(host_draft, arena)
        #: Read a step's results when the next one has been launched, so that the device never waits for the host.
        #: Only where it runs beside the host, and where nothing of a step decides which tier comes next, or has to be
        #: cleared in front of it.
        waits = (ready and "draft_lens" in arena) or reads_dead_places or host_draft is not None
        self.late = arena.device.type == "cuda" and not waits
        self._reads_dead_places = reads_dead_places
        self._reach = reach
        self._flights: deque[Flight] = deque()

    @property
    def idle(self) -> bool:
        """Nothing waits and nothing runs."""
        return not (self.running or len(self.waiting) or self._flights)

    @property
    def policy(self) -> AnyPolicy:
        """Chooses the draft length of each step. Another one may be put here at any time; it has seen nothing yet."""
        return self.policies.policy

    @policy.setter
    def policy(self, policy: AnyPolicy) -> None:
        self.policies.policy = policy

    def prepared(self, kind: Kind, *, watched: bool) -> bool:
        """What requests of a kind run is there: for those whose tokens are ``watched``, mixed tiers too."""
        return any(built == kind for *_, built in self.tiers) and (not watched or kind in self._mixed_kinds)

    @one_build()
    def prepare(self, kind: Kind, *, watched: bool = False) -> None:
        """Make what is not there of that. Steps may run meanwhile, unless ``parks``."""
        if not any(built == kind for *_, built in self.tiers):
            made = self._make(kind)
            self.prefill_tiers = {**self.prefill_tiers, **made.prefill}
            self.tiers = {**self.tiers, **made.tiers}
        if watched and kind not in self._mixed_kinds:
            self.mixed_tiers = {**self.mixed_tiers, **self._make_mixed(kind)}
            self._mixed_kinds.add(kind)

    def next_tier(self) -> Tier:
        """The draft length the policy asks for, or the smallest that serves all drafts that rows may have: those that a
        ready drafter proposed, those that requests want at most; the smallest row count that holds all live rows; and
        the least kind that serves all of them."""
        return self.tiers[self._tier_name(self._draft_len_for(self._offers()))]

    def _offers(self) -> list[Row]:
        scores, reach = self.policies.learns, self._reach
        return policy_rows(self._rows, self.arena, self.draft_lens[-1], ready=self.ready, scores=scores, reach=reach)

    def _tier_name(self, draft_len: int) -> TierName:
        live = len(self._rows)
        return draft_len, min(rows for rows in self.row_counts if rows >= live), self._kind_of_rows()

    def _draft_len_for(self, offered: list[Row]) -> int:
        draft_len = self.policies.choose(offered, len(self._flights))
        # Behind its reach a network drafts for nobody.
        behind = self._reach is not None and not any(row.draft_len for row in offered)
        if self._stuck or behind:
            draft_len = 0
        else:
            most = max((row.draft_len for row in offered), default=0) if self.ready else self._most_wanted()
            draft_len = min(size for size in self.draft_lens if size >= min(draft_len, most))
        return draft_len

    def _most_wanted(self) -> int:
        wanted = (request.params.num_draft_tokens for request in self._rows)
        return max((self.draft_lens[-1] if count is None else count for count in wanted), default=0)

    # --- a step --------------------------------------------------------------------------------------

    def run_step(self) -> list[Request]:
        """Read prompts within the budget, then run one tier over all rows, if there are any; returns those rows.

        While nobody watches tokens come, prompts go first: one chunk, and no tier.

        Raises:
            BaseException: none but the wish to stop everything, such as a ``KeyboardInterrupt``. What is wrong with a
                request is told to that request.
        """
        try:
            if self._prefill():
                return []
            rows = self._ready_rows()
            if rows:
                self._decode(rows)
            while len(self._flights) > (self.late and bool(rows)):
                self._collect(self._flights.popleft())
            return rows
        except BaseException as error:
            # Whose fault it was cannot be told, and what the others have in the arena may be half a step.
            self._flights.clear()
            self._fail(self.running, error)
            return []

    def _ready_rows(self) -> list[Request]:
        """The rows, when those that ask the host what may come next have been answered."""
        asking = [request for request in self._rows if request.on_host]
        while asking and self._flights:
            self._collect(self._flights.popleft())
        for request in asking:
            if not request.finished:
                self._ask(request)
        if self.host_drafter is not None:
            for request in list(self._rows):
                self._propose(self.host_drafter, request)
        return list(self._rows)

    def _propose(self, drafter: HostDrafter, request: Request) -> None:
        """Have its slot's drafts made on the host; what fails there is its own failure."""
        try:
            drafter.propose(request)
        except BaseException as error:
            self._fail([request], error)

    def _decode(self, rows: list[Request]) -> None:
        reader = self._prefilling
        if reader is not None and not self._reads_along(reader):
            reader = None
        offered, budget = self._offers(), self.prefill_budget
        draft_len, tiers, note = self._draft_len_for(offered), self.tiers, budget.note_step
        if reader is not None:
            self._point_at(reader)
            draft_len, tiers = budget.mixed_draft_len(draft_len, self.draft_lens), self.mixed_tiers
            note = budget.note_mixed
        self.tier = tiers[self._tier_name(draft_len)]
        started = time.perf_counter()
        with self.clock.time(partial(note, draft_len)):
            self.tier.run()
        places = self.tier.draft_len + 1
        records = {row: row.records.look(row.slot, places) for row in rows if row.params.wanted}
        taken, mixed = self.outcomes.take(), reader is not None
        self._flights.append(Flight(rows, taken, records, offered, self.tier.draft_len, started, mixed))
        proposed = any(row.draft_len for row in offered)
        self.stats.count_step(self.tier.draft_len, self.tier.key.rows, proposed=proposed)
        if reader is not None:
            self._read_along(reader, self.tier.key.prompt_tokens)

    def _collect(self, flight: Flight) -> None:
        """Hand out what a run of a tier emitted. Requests that ended while it ran get nothing of it."""
        columns = flight.outcome.read()
        self._learn(flight, columns)
        for request in flight.rows:
            if request.finished:
                continue
            emitted, accepted, proposed, alive, *newest = (column[request.slot] for column in columns)
            if alive and not emitted:
                self._set_back(request)
                continue
            self._stuck.discard(request)
            self.stats.count(emitted, accepted, proposed)
            request.stats.count(emitted, accepted, proposed)
            self._hand_out(request, newest[:emitted], bool(alive), flight.records.get(request, {}))
        self._retire(flight.rows)

    def _learn(self, flight: Flight, columns: list[list[int]]) -> None:
        """Tell a policy that learns what came of a run. Of one that others were launched behind nobody knows what it
        took."""
        milliseconds = None
        if not self.late:
            seconds = time.perf_counter() - flight.started
            self.stats.count_seconds(flight.draft_len, seconds)
            # What a prompt takes that is read along is no cost of the tier.
            milliseconds = None if flight.mixed else 1e3 * seconds
        if not self.policies.learns:
            return
        slots = [request.slot for request in flight.rows]
        done = done_of(flight.draft_len, flight.offered, slots, columns[:4], milliseconds)
        self.policies.note(done, [row.draft_len for row in flight.offered])

    def _set_back(self, request: Request) -> None:
        """Nothing could be chosen in front of its drafts: its next step has none."""
        self._stuck.add(request)
        if self._reads_dead_places:
            self.arena.clear_text_state(request.slot, request.cached)

"""One step: prompts are processed, a tier runs over the rows, its results are delivered."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from speccompile.graph.arena import Arena
from speccompile.graph.tree import Tree
from speccompile.lowering.tier import Tier
from speccompile.policies.base import Row, Upcoming
from speccompile.runtime.batch import Batch
from speccompile.runtime.delivery import Delivery, Judgement
from speccompile.runtime.host_calls import HostCalls
from speccompile.runtime.outcomes import Columns, Outcome, Outcomes
from speccompile.runtime.policy_controller import Policies
from speccompile.runtime.policy_inputs import done_of
from speccompile.runtime.prompt_reader import PromptReader
from speccompile.runtime.request import Request
from speccompile.runtime.retirement import Retirement
from speccompile.runtime.score_records import Record
from speccompile.runtime.segmented_drafter import SegmentedDrafter
from speccompile.runtime.slots import Slots
from speccompile.runtime.stats import Stats
from speccompile.runtime.tier_choice import TierChoice
from speccompile.runtime.tier_table import TierTable
from speccompile.runtime.timing import Clock
from speccompile.runtime.token_trace import KeptRow, TokenRecorder
from speccompile.runtime.unread_tokens import UnreadTokens


@dataclass(frozen=True)
class Flight:
    """A run whose results have not been read yet.

    Args:
        rows: its requests.
        tier: the tier that ran.
        outcome, records: copies, since the next run overwrites the arena. Rows without extra outputs have empty
            records.
        offered: the policy's inputs, for each row.
        started: when the run began, in seconds of ``time.perf_counter``.
        timed: the seconds of the run, as soon as the clock has reported them.
        mixed: whether it also processed a piece of a prompt.
        kept: copies for a trace with tokens; None without one.
    """

    rows: list[Request]
    tier: Tier
    outcome: Outcome
    records: dict[Request, Record]
    offered: list[Row]
    started: float
    timed: list[float]
    mixed: bool
    kept: tuple[TokenRecorder, list[KeptRow]] | None


class Scheduler:
    """Runs steps, in one thread at a time (:class:`~speccompile.runtime.engine_loop.EngineLoop`). Every change of tier
    is one assignment to :attr:`tier`.

    Args:
        outcomes: results of each run.
        clock: the prompt reader's clock, so measurements arrive in the order of runs.
        late: read a step's results when the next step has been launched, so the device never waits for the host. The
            tier is then chosen by the results of the step before.
        clears_rejected: the state after the sequence is cleared for a row whose logits became NaN by its drafts.
        drafter: runs the segments of a drafter before a step, between which the policy may stop it; None if the tier
            runs its drafter.
        unread: lets the drafter read what only the target has read; None if every step updates the drafter.

    Attributes:
        tier: the tier that ran last.
        failures: number of steps in a row that failed as a whole.
    """

    def __init__(
        self,
        arena: Arena,
        table: TierTable,
        batch: Batch,
        slots: Slots,
        prompts: PromptReader,
        choice: TierChoice,
        policies: Policies,
        host_calls: HostCalls,
        delivery: Delivery,
        retirement: Retirement,
        outcomes: Outcomes,
        stats: Stats,
        clock: Clock,
        *,
        late: bool,
        clears_rejected: bool,
        drafter: SegmentedDrafter | None = None,
        unread: UnreadTokens | None = None,
    ) -> None:
        self._arena = arena
        self._table = table
        self._batch = batch
        self._slots = slots
        self._prompts = prompts
        self._choice = choice
        self._policies = policies
        self._host_calls = host_calls
        self._delivery = delivery
        self._retirement = retirement
        self._stats = stats
        self._clears_rejected = clears_rejected
        self._drafter = drafter
        self._unread = unread
        self._clock = clock
        self._columns = Columns.of(arena)
        self.outcomes = outcomes
        self.late = late
        self.flights: deque[Flight] = deque()
        self.failures = 0
        self.tier = next(iter(table.tiers.values()))

    def run_step(self) -> list[Request]:
        """Process prompts within the budget, then run one tier over all rows, if there are any. Return these rows.

        While no caller watches the tokens of a request, prompts go first: one chunk runs, and no tier.

        Raises:
            BaseException: only an interrupt, such as a ``KeyboardInterrupt``. An error of a request is raised to its
                readers.
        """
        try:
            if self._prompts.read():
                return []
            self._answer_hosts()
            self._extend_rows()
            rows = list(self._batch.rows)
            if rows:
                self._launch(rows)
            while len(self.flights) > (self.late and bool(rows)):
                self._collect(self.flights.popleft())
            if rows:
                self.failures = 0
            return rows
        except BaseException as error:
            # The step as a whole failed, and the arena may hold a part of its results.
            self.flights.clear()
            self.failures += 1
            self._retirement.fail_all(self._in_step(), error)
            return []

    def _in_step(self) -> list[Request]:
        """Return the rows and the request whose prompt the step also processes, or, without any of these, all requests
        with a slot. A half-processed prompt that was not in the failed step continues after it."""
        along = self._prompts.along
        return [*self._batch.rows, *([] if along is None else [along])] or self._slots.owned

    def _answer_hosts(self) -> None:
        """Call the host for the rows before they run. The calls need their newest tokens."""
        asking = [request for request in self._batch.rows if request.on_host]
        while asking and self.flights:
            self._collect(self.flights.popleft())
        self._host_calls.draft(self._batch.rows)
        for request in asking:
            if not request.finished:
                self._host_calls.ask(request)

    def _extend_rows(self) -> None:
        """Let each row hold the pages that its next step writes to. While there are too few, the newest request of the
        lowest priority stops, and is read again later."""
        if self._slots.pool is None:
            return
        for request in sorted(self._batch.rows, key=_precedence):
            while request in self._batch.rows and not self._slots.extend(request, len(self.flights)):
                if self.flights:
                    # Its requests may have ended, and must not stop before their tokens are known.
                    self._collect(self.flights.popleft())
                else:
                    self._prompts.stop(max(self._slots.owned, key=_precedence))

    def _launch(self, rows: list[Request]) -> None:
        reader = self._prompts.along
        offered, budget = self._choice.policy_inputs(), self._prompts.budget
        draft_len, tiers, note = self._choice.draft_len(offered, len(self.flights)), self._table.tiers, budget.note_step
        if reader is not None:
            draft_len = budget.mixed_draft_len(draft_len, self._table.chains)
            tiers, note = self._table.mixed_tiers, budget.note_mixed
        name = self._choice.name(draft_len)
        tier = self.tier = tiers[name]
        drafts = Upcoming(tuple(offered)).drafted
        started, timed = time.perf_counter(), list[float]()

        def note_seconds(seconds: float) -> None:
            # A drafter that is stopped changes ``tier``.
            note(tier.draft_len, seconds)
            timed.append(seconds)

        with self._clock.time(note_seconds):
            # What a drafter must read first is a cost of its step.
            if self._unread is not None:
                in_flight = [flight.tier for flight in self.flights]
                # A fused drafter runs in every tier with drafts.
                runs = bool(tier.draft_len) and (drafts or tier.drafter is None)
                self._unread.before_step(rows, tier, in_flight, drafts=runs)
            if reader is not None:
                self._prompts.point_at(reader)
            if self._drafter is not None:
                tier, offered = self._drafter.run(name, rows, offered)
                self.tier = tier
                tier.run_target()
            elif drafts:
                tier.run()
            else:
                tier.run_target()
        records = {row: self._record(row, tier.draft_len + 1) for row in rows}
        kept = self._policies.keep(self._arena, rows, tier.draft_len, tier.key.sampling)
        outcome, mixed = self.outcomes.take(), reader is not None
        self.flights.append(Flight(rows, tier, outcome, records, offered, started, timed, mixed, kept))
        if reader is not None:
            self._prompts.count_along(reader, tier.key.prompt_tokens)

    def _record(self, row: Request, positions: int) -> Record:
        """Copy the results of the run in the slot of ``row``, which the next run overwrites. An error only ends that
        row."""
        try:
            self._slots.save_checkpoint(row)
            return row.records.read(self._arena, row.slot, positions) if row.params.outputs else {}
        except BaseException as error:
            self._retirement.fail_all([row], error)
            return {}

    def _collect(self, flight: Flight) -> None:
        """Deliver the emitted tokens of a run. A request that ended during the run receives none of them."""
        columns = flight.outcome.read()
        of_tree = columns[self._columns.of_tree] if isinstance(flight.tier.draft_len, Tree) else []
        self._learn(flight, columns, of_tree[:2])
        for request in flight.rows:
            if request.finished:
                continue
            emitted, accepted, proposed, alive, *newest = (column[request.slot] for column in columns)
            source, request.proposal = request.proposal.source, self._columns.proposal(columns, request.slot)
            if alive and not emitted:
                self._retry_without_drafts(request)
                continue
            self._batch.without_drafts.discard(request)
            depth = of_tree[2][request.slot] if of_tree else None
            record, judgement = flight.records[request], Judgement(accepted, proposed, depth, source)
            self._delivery.deliver(request, newest[:emitted], bool(alive), record, judgement)
        if self._unread is not None:
            self._unread.after_step(flight.rows, flight.tier)
        self._stats.count_step_tokens()
        self._retirement.retire(flight.rows)

    def _learn(self, flight: Flight, columns: list[list[int]], chain: Sequence[list[int]]) -> None:
        """Count a run, and report it to a policy that learns. ``chain`` has the results of the chain in a tree."""
        draft_len, offered, seconds = flight.tier.draft_len, flight.offered, time.perf_counter() - flight.started
        if self.late:
            # Other runs were launched since, so only the clock knows the duration.
            self._clock.report()
            (seconds,) = flight.timed
            if self._drafter is None:
                # When the run was launched, the results of the run before it were unknown. They are known by now.
                offered = self._choice.inputs_of(flight.rows)
        # A tree only runs if a row has one.
        proposed = isinstance(draft_len, Tree) or any(row.draft_len for row in offered)
        self._stats.count_step(draft_len, flight.tier.key.rows, proposed=proposed)
        self._stats.count_seconds(draft_len, seconds)
        if not self._policies.learns:
            return
        slots = [request.slot for request in flight.rows]
        # The time of a prompt that was also processed is not a cost of the tier.
        milliseconds = None if flight.mixed else 1e3 * seconds
        done = done_of(draft_len, offered, slots, columns[:4], milliseconds, chain)
        newest = [] if flight.kept is None else [[column[slot] for column in columns[4:]] for slot in slots]
        self._policies.note(done, [row.draft_len for row in offered], flight.rows, newest, flight.kept)

    def _retry_without_drafts(self, request: Request) -> None:
        """Let the next step of ``request`` have no drafts, since no token could be chosen before its drafts."""
        self._batch.without_drafts.add(request)
        if self._clears_rejected:
            self._arena.clear_text_state(request.slot, request.cached)


def _precedence(request: Request) -> tuple[int, int]:
    return -request.params.priority, request.number

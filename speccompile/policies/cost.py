"""``cost``: the tier with the most expected tokens per millisecond, from acceptance and measured costs of steps."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from speccompile.policies.acceptance import AcceptanceEstimator
from speccompile.policies.base import Done, Ladder, Row, TreeTier, Upcoming
from speccompile.policies.costs import CostTable, RunningCosts
from speccompile.policies.options import check_built, check_candidates, check_number, text_of

#: Default hysteresis, as a share of the current tier's cost. Another tier must save more than this per step.
HYSTERESIS = 0.005
#: Smallest number of steps between two probes, and largest number of consecutive probes.
PROBE_GAP, PROBES_IN_A_ROW = 4, 8
#: Largest number of probes for which time is saved up.
SAVED_PROBES = 4


@dataclass(frozen=True)
class Cost:
    """Maximise expected emitted tokens over the measured cost of each tier, at the current rows and context.

    Args:
        hysteresis_ms: milliseconds that another tier must save per step to replace the current one; None is half a
            percent of a step.
        probing: share of the time that may be spent on probes, steps which only test whether more drafts would be
            accepted. Their schedule does not depend on results, which keeps the estimates unbiased.
        candidates: draft lengths to choose from; None is all tiers, trees included.
    """

    hysteresis_ms: float | None = None
    probing: float = 0.008
    candidates: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        if self.hysteresis_ms is not None:
            check_number("cost", "hysteresis_ms", self.hysteresis_ms, least=0.0)
        check_number("cost", "probing", self.probing, least=0.0, most=1.0)
        check_candidates("cost", self.candidates, by_rows=False)

    def __str__(self) -> str:
        return text_of("cost", self)

    @property
    def uses_costs(self) -> bool:
        """True: the tiers are timed before the first step."""
        return True

    def check(self, draft_lens: Collection[int]) -> None:
        """Check that the candidates were built.

        Raises:
            UnknownTier: a candidate was not built.
        """
        check_built(self.candidates or (), draft_lens)

    def start(self, ladder: Ladder) -> CostChooser:
        """Return a chooser over the candidates, or over all tiers, without history."""
        assert ladder.costs is not None
        trees = {} if self.candidates else ladder.trees
        return CostChooser(self, self.candidates or ladder.draft_lens, ladder.costs, trees)


class CostChooser:
    """Chooser of :class:`Cost`."""

    def __init__(
        self,
        options: Cost,
        candidates: tuple[int, ...],
        costs: CostTable,
        trees: Mapping[int, TreeTier] | None = None,
    ) -> None:
        self._options = options
        self._chains, self._trees = candidates, tuple(trees or ())
        self._candidates = (*candidates, *self._trees)
        self._costs = RunningCosts(costs)
        self._acceptance = AcceptanceEstimator(max(candidates), trees)
        self._now = candidates[-1]
        # Milliseconds that may be spent on probes; number of probes so far; steps since the newest one; number of
        # consecutive ones.
        self._saved = 0.0
        self._probes = 0
        self._since_probe = self._in_a_row = 0
        self._probe: int | None = None
        self._promising = False

    # --- choosing ----------------------------------------------------------------------------------

    def choose(self, upcoming: Upcoming) -> int:
        """Return the tier with the most expected tokens per millisecond, or now and then a larger one as a probe."""
        rows = upcoming.rows
        if not rows:
            return self._now
        emitted, costs = self._emitted(rows), self._costs_of(upcoming)
        self._now = self._best(emitted, costs)
        self._since_probe += 1
        self._probe = self._next_probe(rows, emitted, costs)
        if self._probe is None:
            return self._now
        self._since_probe = 0
        return self._probe

    def stops(self, upcoming: Upcoming, drafted: int) -> bool:
        """Return whether the drafts so far have a better rate of expected tokens than more drafts would."""
        # To stop a probe by its scores would bias what it measures.
        if self._probe is not None or drafted not in self._candidates:
            return False
        emitted, costs = self._emitted(upcoming.rows), self._costs_of(upcoming)
        rates = {k: emitted[k] / costs[k] for k in self._candidates if drafted <= k <= self._now}
        return max(rates, key=lambda k: (rates[k], -k)) == drafted

    def _costs_of(self, upcoming: Upcoming) -> dict[int, float]:
        """Milliseconds of the next step, by draft length."""
        rows = upcoming.rows
        # Each unread step has advanced every sequence, by at least one token.
        context = sum(row.context for row in rows) / len(rows) + upcoming.unread
        return self._costs.of_tiers(len(rows), self._candidates, context, drafted=upcoming.drafted)

    def _emitted(self, rows: Sequence[Row]) -> dict[int, float]:
        """Expected emitted tokens of a row, by draft length: the geometric mean over the rows.

        The geometric mean favours slow rows. A row that emits slowly keeps its slot for longer. To maximise the sum
        would speed up rows that are fast already at the expense of the slow ones, and the whole batch would end later.
        """
        emitted = self._acceptance.emitted(rows, self._candidates)
        if len(rows) == 1:
            return {tier: tokens for tier, (tokens,) in emitted.items()}
        return {tier: math.exp(sum(map(math.log, tokens)) / len(rows)) for tier, tokens in emitted.items()}

    def _best(self, emitted: dict[int, float], costs: dict[int, float]) -> int:
        # Of equals, the smallest is chosen: drafts that no row has would cost time without a gain.
        best = max(self._candidates, key=lambda k: (emitted[k] / costs[k], -k))
        now = self._now
        saved = emitted[best] * costs[now] / emitted[now] - costs[best]
        least = self._options.hysteresis_ms
        return best if saved > (HYSTERESIS * costs[now] if least is None else least) else now

    # --- probing -----------------------------------------------------------------------------------

    def _next_probe(self, rows: Sequence[Row], emitted: dict[int, float], costs: dict[int, float]) -> int | None:
        """Return a tier that tests more drafts than the current one, or None if a probe is not due or cannot show
        anything."""
        now = self._now
        self._saved += self._options.probing * costs[now]
        if self._since_probe < PROBE_GAP and not self._promising:
            self._in_a_row = 0
            return None
        others = self._worth_a_look(max(row.draft_len for row in rows), emitted, costs)
        if not others:
            return None
        probe = others[self._probes % len(others)]
        lost = max(0.0, costs[probe] - emitted[probe] * costs[now] / emitted[now])
        if self._promising:
            self._promising = False
            self._in_a_row += 1
            return probe if self._in_a_row < PROBES_IN_A_ROW else None
        self._in_a_row = 0
        self._saved = min(self._saved, SAVED_PROBES * lost + self._options.probing * costs[now])
        if self._saved < lost:
            return None
        self._saved -= lost
        self._probes += 1
        return probe

    def _worth_a_look(self, offered: int, emitted: dict[int, float], costs: dict[int, float]) -> list[int]:
        """Return tiers that show more than the current one: the cheapest longer chain (beside a tree, the best chain),
        and all other trees. ``offered``: largest number of drafts of a row."""
        if not offered:
            return []
        trees = [tree for tree in self._trees if tree != self._now]
        if self._now in self._trees:
            chains = sorted((k for k in self._chains if k), key=lambda k: -emitted[k] / costs[k])[:1]
        else:
            longer = [k for k in self._chains if k > self._now] if offered > self._now else []
            chains = sorted(longer, key=lambda k: (costs[k], k))[:1]
        return [*chains, *trees]

    # --- learning ----------------------------------------------------------------------------------

    def note(self, done: Done) -> None:
        """Learn acceptance and time from the results of a step."""
        rows = len(done.requests)
        if not rows:
            return
        context = sum(done.contexts) / rows
        # A probe with a tree, or beside a tree, cannot be compared with the current tier.
        if done.draft_len > self._now and not {done.draft_len, self._now} & set(self._trees):
            # The step was a probe. If it paid, the next probe follows at once.
            ms = self._costs.of_tiers(rows, (done.draft_len, self._now), context, drafted=done.drafted)
            without_probe = rows if self._now == 0 else sum(min(n, self._now + 1) for n in done.emitted)
            self._promising = sum(done.emitted) / ms[done.draft_len] > without_probe / ms[self._now]
        self._acceptance.note(done)
        if done.milliseconds is not None and done.draft_len in self._candidates:
            self._costs.note(rows, done.draft_len, context, done.milliseconds, drafted=done.drafted)

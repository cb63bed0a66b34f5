"""Replays sequences with a policy, in simulated time."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from speccompile.policies.base import AnyPolicy, Chooser, Done, Ladder, Row, Upcoming, start
from speccompile.policies.costs import CostTable
from speccompile.tools.policy_lab.texts import Text


@dataclass(frozen=True)
class SimulatedRun:
    """Results of a simulated run.

    Args:
        residency: number of steps by draft length.
        timeline: time at the end of each step, and its draft length.
        by_text: time of the steps of each sequence. Rows that run together share a step's time equally.
    """

    policy: str
    tokens: int
    milliseconds: float
    residency: dict[int, int]
    timeline: list[tuple[float, int, int]] = field(repr=False)
    by_text: list[float] = field(repr=False)

    @property
    def steps(self) -> int:
        """Number of steps."""
        return len(self.timeline)

    @property
    def speed(self) -> float:
        """Tokens per millisecond."""
        return self.tokens / self.milliseconds

    @property
    def acceptance_length(self) -> float:
        """Mean emitted tokens of a step, over all its rows."""
        return self.tokens / self.steps


class Oracle:
    """Chooser that knows the true acceptance probabilities of all sequences, but not the random draws."""

    def __init__(self, texts: Sequence[Text], ladder: Ladder, costs: CostTable) -> None:
        self._texts, self._ladder, self._costs = texts, ladder, costs

    def __str__(self) -> str:
        return "oracle"

    def choose(self, upcoming: Upcoming) -> int:
        """Return the draft length with the greatest true expected speed."""
        rows, context = upcoming.rows, _mean_context(upcoming.rows)

        def speed(draft_len: int) -> float:
            emitted = 0.0
            for row in rows:
                text, chance = self._texts[row.request], 1.0
                emitted += 1.0
                for share in text.chances(row.context - text.prompt, min(draft_len, row.draft_len)):
                    chance *= share
                    emitted += chance
            return emitted / self._costs.ms(len(rows), draft_len, context, drafted=upcoming.drafted)

        return max(self._ladder.draft_lens, key=lambda draft_len: (speed(draft_len), -draft_len))

    def note(self, done: Done) -> None:
        """Ignore the results."""


def simulate(
    policy: AnyPolicy,
    texts: Sequence[Text],
    ladder: Ladder,
    costs: CostTable,
    *,
    max_rows: int = 8,
    late: bool = False,
    ready: bool = True,
) -> SimulatedRun:
    """Run all sequences, at most ``max_rows`` at a time. The time of each step is taken from ``costs``.

    Args:
        ladder: tiers. Its costs are those that the policy assumes.
        late: the policy receives the results of a step after the next step was chosen.
        ready: run the smallest tier that holds the available drafts, not the chosen tier.
    """
    return run(start(policy, ladder), str(policy), texts, ladder, costs, max_rows=max_rows, late=late, ready=ready)


def oracle(
    texts: Sequence[Text], ladder: Ladder, costs: CostTable, *, max_rows: int = 8, ready: bool = True
) -> SimulatedRun:
    """Run the sequences with :class:`Oracle`: the speed that a policy could reach at best."""
    chooser = Oracle(texts, ladder, costs)
    return run(chooser, "oracle", texts, ladder, costs, max_rows=max_rows, late=False, ready=ready)


def run(
    chooser: Chooser,
    name: str,
    texts: Sequence[Text],
    ladder: Ladder,
    costs: CostTable,
    *,
    max_rows: int,
    late: bool,
    ready: bool,
) -> SimulatedRun:
    waiting = deque(range(len(texts)))
    at = [0] * len(texts)
    live: list[int] = []
    unread: deque[Done] = deque()
    now, tokens, residency = 0.0, 0, Counter[int]()
    timeline: list[tuple[float, int, int]] = []
    by_text = [0.0] * len(texts)
    while True:
        while waiting and len(live) < max_rows:
            live.append(waiting.popleft())
        if not live:
            break
        rows = tuple(_row(texts[index], index, at[index], ladder.largest) for index in live)
        draft_len = chooser.choose(Upcoming(rows, len(unread)))
        if ready:
            draft_len = ladder.serving(draft_len, max(row.draft_len for row in rows))
        done = _step(texts, rows, draft_len, costs)
        assert done.milliseconds is not None
        now += done.milliseconds
        tokens += sum(done.emitted)
        residency[draft_len] += 1
        timeline.append((now, draft_len, sum(done.emitted)))
        for index, emitted in zip(live, done.emitted, strict=True):
            at[index] += emitted
            by_text[index] += done.milliseconds / len(live)
        live = [index for index in live if at[index] < texts[index].length]
        unread.append(done)
        while len(unread) > late:
            chooser.note(unread.popleft())
    return SimulatedRun(name, tokens, now, dict(sorted(residency.items())), timeline, by_text)


def _row(text: Text, index: int, position: int, longest: int) -> Row:
    count = text.offered(position, min(longest, text.length - position - 1))
    return Row(index, text.prompt + position, count, text.scores(position, count), text.found(position))


def _step(texts: Sequence[Text], rows: Sequence[Row], draft_len: int, costs: CostTable) -> Done:
    proposed = tuple(min(draft_len, row.draft_len) for row in rows)
    accepted = tuple(
        texts[row.request].accepted(row.context - texts[row.request].prompt, count)
        for row, count in zip(rows, proposed, strict=True)
    )
    return Done(
        draft_len,
        tuple(row.request for row in rows),
        tuple(row.context for row in rows),
        proposed,
        accepted,
        tuple(a + 1 for a in accepted),
        tuple(row.scores[:count] for row, count in zip(rows, proposed, strict=True)),
        costs.ms(len(rows), draft_len, _mean_context(rows), drafted=Upcoming(tuple(rows)).drafted),
        tuple(row.found for row in rows),
    )


def _mean_context(rows: Sequence[Row]) -> float:
    return sum(row.context for row in rows) / len(rows)

"""How prompts are cut into chunks, and how much of them is read between two decode steps."""

from __future__ import annotations

import statistics
from collections import defaultdict, deque
from collections.abc import Sequence

# A decode step and the prompt chunks in front of it may take so many times a usual step: what a running request waits
# for its next token, at most. The promise is 3; a chunk behind a long text costs more than the measured one.
LONGEST_WAIT = 2.0
# The same for one that drafts and reads a piece of a prompt along: it could go without drafts, and what it takes varies
# more.
LONGEST_WAIT_WITH_DRAFTS = 1.5
# Newest measurements that an estimate is made of.
STEPS = 32
CHUNKS = 5
# Runs of other kinds after which the oldest measurement of an unused one is dropped: one slow run must not rule a width
# out for good.
FORGOTTEN = 64
# The budget in tokens where chunks may not depend on time and none was given.
FIXED_TOKENS = 64


def chunk_widths(length: int, widths: Sequence[int]) -> list[int]:
    """Cut a prompt of ``length`` tokens into chunks of the given (ascending) ``widths``, the last one padded."""
    chunks = []
    while length > 0:
        chunks.append(next_width(length, widths))
        length -= chunks[-1]
    return chunks


def next_width(length: int, widths: Sequence[int]) -> int:
    """The next chunk for ``length`` tokens: the smallest width that covers them when little of it is padding, else the
    largest that fits."""
    covering = [width for width in widths if length <= width <= length * 3 // 2]
    fitting = [width for width in widths if width <= length]
    return covering[0] if covering else fitting[-1] if fitting else widths[0]


class RecentMinimum:
    """What something takes that may not run for a long time."""

    def __init__(self) -> None:
        self._measured: deque[float] = deque(maxlen=CHUNKS)
        self._unused = 0

    @property
    def seconds(self) -> float | None:
        """The least of what was measured lately: few runs tell little of how slow the machine may be meanwhile. None if
        it is not known."""
        return min(self._measured, default=None)

    def note(self, seconds: float) -> None:
        self._measured.append(seconds)
        self._unused = 0

    def pass_over(self) -> None:
        """Something else ran."""
        self._unused += 1
        if self._measured and self._unused >= FORGOTTEN:
            self._measured.popleft()
            self._unused = 0


class PrefillBudget:
    """What prefill may cost between two decode steps while somebody watches tokens come.

    Args:
        widths: chunk widths that were built, ascending.
        tokens: the budget; None measures chunks and steps as they run, and keeps a step with its chunks within
            ``LONGEST_WAIT`` usual steps. Either way a step reads at least one chunk of the smallest width, so that
            prompts get on.
        fixed: chunks depend on the prompt alone, never on time or neighbours.
    """

    def __init__(self, widths: Sequence[int], tokens: int | None, *, fixed: bool) -> None:
        self.tokens = FIXED_TOKENS if fixed and tokens is None else tokens
        self.fixed = fixed
        self._widths = tuple(widths)
        self._steps: deque[float] = deque(maxlen=STEPS)
        # By draft length.
        self._tiers: defaultdict[int, deque[float]] = defaultdict(lambda: deque(maxlen=CHUNKS))
        self._mixed: defaultdict[int, RecentMinimum] = defaultdict(RecentMinimum)
        self._chunks = {width: RecentMinimum() for width in widths}

    def note_step(self, draft_len: int, seconds: float) -> None:
        """A decode step of a tier took so long."""
        self._steps.append(seconds)
        self._tiers[draft_len].append(seconds)

    def note_chunk(self, width: int, seconds: float) -> None:
        """A prompt chunk took so long."""
        self._note(self._chunks[width], seconds)

    def note_mixed(self, draft_len: int, seconds: float) -> None:
        """A decode step of a tier that read a piece of a prompt along took so long."""
        self._note(self._mixed[draft_len], seconds)

    def _note(self, ran: RecentMinimum, seconds: float) -> None:
        for measured in (*self._chunks.values(), *self._mixed.values()):
            if measured is ran:
                measured.note(seconds)
            else:
                measured.pass_over()

    @property
    def mixes(self) -> bool:
        """Prompts are read along with decode steps: no budget was given, and without drafts it takes no longer than it
        may."""
        return self.tokens is None and self._mixed_fits(0)

    def mixed_draft_len(self, wanted: int, draft_lens: Sequence[int]) -> int:
        """Where it mixes, the largest of ``draft_lens`` up to ``wanted`` with which a decode step that reads a piece of
        a prompt along takes no longer than it may."""
        return max(size for size in draft_lens if size == 0 or (size <= wanted and self._mixed_fits(size)))

    def _mixed_fits(self, draft_len: int) -> bool:
        """Without drafts a step may also take what one behind the smallest chunk takes, which reads less. What is not
        known is tried without drafts, and with drafts where that tier's own step fits."""
        measured, usual = self._mixed[draft_len].seconds, self.usual_step
        longest = max(LONGEST_WAIT * usual, usual + self.seconds(self._widths[0]))
        if draft_len:
            longest = LONGEST_WAIT_WITH_DRAFTS * usual
            if measured is None:
                measured = statistics.median(self._tiers[draft_len] or [float("inf")])
        return not usual or measured is None or measured <= longest

    @property
    def usual_step(self) -> float:
        """Seconds; 0.0 before the first step."""
        return statistics.median(self._steps) if self._steps else 0.0

    def seconds(self, width: int) -> float:
        """What a chunk is expected to take. One that never ran: as long per token as the next smaller one, or nothing,
        so that the smallest is tried first."""
        for known in reversed([known for known in self._widths if known <= width]):
            if (measured := self._chunks[known].seconds) is not None:
                return measured * width / known
        return 0.0 if width == self._widths[0] else float("inf")

    def next_chunk(self, length: int, spent: Sequence[int] | None) -> int | None:
        """The next chunk of a prompt with ``length`` tokens to go, or None if it has to wait for the decode step.

        Args:
            spent: widths that ran since the last decode step; None where nobody waits, and nothing bounds it.
        """
        if self.fixed:
            assert self.tokens is not None
            widths: Sequence[int] = [width for width in self._widths if width <= self.tokens] or self._widths[:1]
            widths = [next_width(length, widths)]
        else:
            widths = self._widths
        allowed = [width for width in widths if spent is None or self._fits(width, spent)]
        if not allowed and not spent:
            allowed = [widths[0]]
        return next_width(length, allowed) if allowed else None

    def _fits(self, width: int, spent: Sequence[int]) -> bool:
        if self.tokens is not None:
            return sum(spent) + width <= self.tokens
        seconds = sum(self.seconds(ran) for ran in [*spent, width])
        return seconds <= (LONGEST_WAIT - 1) * self.usual_step

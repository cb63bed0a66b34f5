"""Chunks of prompts, and the number of prompt tokens that run between two decode steps."""

from __future__ import annotations

import statistics
from collections import defaultdict, deque
from collections.abc import Sequence

# The longest duration of a decode step and the prompt chunks before it, in usual steps. A running request waits this
# long for its next token. The documented limit is 3: a chunk after a long context is slower than the measured one.
LONGEST_WAIT = 2.0
# The same limit for a step with drafts that also processes a piece of a prompt. It is lower, since the step could run
# without drafts, and its duration varies more.
LONGEST_WAIT_WITH_DRAFTS = 1.5
# The number of newest measurements in an estimate.
STEPS = 32
CHUNKS = 5
# After this number of runs of other widths, the oldest measurement of an unused width expires: one slow run must not
# exclude a width for ever.
EXPIRY = 64
# The default budget in tokens if chunks must not depend on time.
FIXED_TOKENS = 64


def next_width(length: int, widths: Sequence[int], flat: int = 1) -> int:
    """Return the next chunk for ``length`` tokens: the smallest width that covers them if little of it is padding or it
    is at most ``flat``, else the largest width that fits."""
    covering = [width for width in widths if length <= width <= max(flat, length * 3 // 2)]
    fitting = [width for width in widths if width <= length]
    return covering[0] if covering else fitting[-1] if fitting else widths[0]


class RecentMinimum:
    """Minimum of the last ``CHUNKS`` timings. Old timings expire while only other widths run."""

    def __init__(self) -> None:
        self._measured: deque[float] = deque(maxlen=CHUNKS)
        self._unused = 0

    @property
    def seconds(self) -> float | None:
        """The minimum in seconds; None without measurements. It is a minimum, since an average of a few timings would
        include slow phases of the machine."""
        return min(self._measured, default=None)

    def note(self, seconds: float) -> None:
        """Add a measurement, in seconds."""
        self._measured.append(seconds)
        self._unused = 0

    def age(self) -> None:
        """Count a run of another width."""
        self._unused += 1
        if self._measured and self._unused >= EXPIRY:
            self._measured.popleft()
            self._unused = 0


class PrefillBudget:
    """The time for prompts between two decode steps while a request's tokens are watched.

    Args:
        widths: chunk widths that were built, ascending.
        tokens: the budget. None times chunks and steps while they run, and limits a step with its chunks to
            ``LONGEST_WAIT`` usual steps. In both cases at least one chunk of the smallest width runs before each step,
            so prompts progress.
        fixed: chunks only depend on the prompt, never on time or other requests.
        flat: a chunk counts as at least this many tokens, and padding up to this size is free.
    """

    def __init__(self, widths: Sequence[int], tokens: int | None, *, fixed: bool, flat: int = 1) -> None:
        self.tokens = FIXED_TOKENS if fixed and tokens is None else tokens
        self.fixed = fixed
        self._flat = flat
        self._widths = tuple(widths)
        self._steps: deque[float] = deque(maxlen=STEPS)
        # Durations by draft length.
        self._tiers: defaultdict[int, deque[float]] = defaultdict(lambda: deque(maxlen=CHUNKS))
        self._mixed: defaultdict[int, RecentMinimum] = defaultdict(RecentMinimum)
        self._chunks = {width: RecentMinimum() for width in widths}

    def note_step(self, draft_len: int, seconds: float) -> None:
        """Record the duration of a decode step of a tier."""
        self._steps.append(seconds)
        self._tiers[draft_len].append(seconds)

    def note_chunk(self, width: int, seconds: float) -> None:
        """Record the duration of a prompt chunk."""
        self._note(self._chunks[width], seconds)

    def note_mixed(self, draft_len: int, seconds: float) -> None:
        """Record the duration of a decode step that also processed a piece of a prompt."""
        self._note(self._mixed[draft_len], seconds)

    def _note(self, ran: RecentMinimum, seconds: float) -> None:
        for measured in (*self._chunks.values(), *self._mixed.values()):
            if measured is ran:
                measured.note(seconds)
            else:
                measured.age()

    @property
    def mixes(self) -> bool:
        """Whether decode steps also process prompts: no budget was given, and such a step without drafts is short
        enough."""
        return self.tokens is None and self._mixed_fits(0)

    def mixed_draft_len(self, draft_len: int, draft_lens: Sequence[int]) -> int:
        """Return the largest of ``draft_lens`` up to ``draft_len`` with which a decode step that also processes a piece
        of a prompt is short enough."""
        return max(size for size in draft_lens if size == 0 or (size <= draft_len and self._mixed_fits(size)))

    def _mixed_fits(self, draft_len: int) -> bool:
        """Whether such a step is short enough. Without drafts it may be as slow as the smallest chunk and a step after
        it, which process fewer tokens. Without a measurement it is tried without drafts. With drafts it is tried if
        that tier's step without a prompt is short enough."""
        measured, usual = self._mixed[draft_len].seconds, self.usual_step
        longest = max(LONGEST_WAIT * usual, usual + self.seconds(self._widths[0]))
        if draft_len:
            longest = LONGEST_WAIT_WITH_DRAFTS * usual
            if measured is None:
                measured = statistics.median(self._tiers[draft_len] or [float("inf")])
        return not usual or measured is None or measured <= longest

    @property
    def usual_step(self) -> float:
        """Median seconds of a step; 0.0 before the first one."""
        return statistics.median(self._steps) if self._steps else 0.0

    def seconds(self, width: int) -> float:
        """Return the expected seconds of a chunk. A width that never ran has the time per token of the next smaller
        one. The smallest width is expected to need none, so it is tried first."""
        for known in reversed([known for known in self._widths if known <= width]):
            if (measured := self._chunks[known].seconds) is not None:
                return measured * width / known
        return 0.0 if width == self._widths[0] else float("inf")

    def next_chunk(self, length: int, spent: Sequence[int] | None) -> int | None:
        """Return the next chunk of a prompt with ``length`` tokens left; None if the decode step comes first.

        Args:
            spent: widths that ran since the last decode step; None means no limit, since no request waits for a step.
        """
        if self.fixed:
            assert self.tokens is not None
            widths: Sequence[int] = [width for width in self._widths if width <= self.tokens] or self._widths[:1]
            widths = [next_width(length, widths, self._flat)]
        else:
            widths = self._widths
        allowed = [width for width in widths if spent is None or self._fits(width, spent)]
        if not allowed and not spent:
            allowed = [widths[0]]
        return next_width(length, allowed, self._flat) if allowed else None

    def _fits(self, width: int, spent: Sequence[int]) -> bool:
        if self.tokens is not None:
            least = min(self._flat, self.tokens)
            return sum(max(least, ran) for ran in [*spent, width]) <= self.tokens
        seconds = sum(self.seconds(ran) for ran in [*spent, width])
        return seconds <= (LONGEST_WAIT - 1) * self.usual_step

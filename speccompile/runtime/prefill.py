"""How prompts are cut into chunks, and how much of them is read between two decode steps."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Sequence

# A decode step and the prompt chunks in front of it may take so many times a usual step: what a running request waits
# for its next token, at most. The promise is 3; a chunk behind a long text costs more than the measured one.
LONGEST_WAIT = 2.0
# Newest measurements that an estimate is made of.
STEPS = 32
CHUNKS = 5
# Chunks of other widths after which the oldest measurement of an unused one is dropped: one slow run must not rule a
# width out for good.
FORGOTTEN = 64
# Stands for mixed steps where others are told by their width.
MIXED = 0
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
        # Of chunks by width, and of mixed steps.
        self._chunks: dict[int, deque[float]] = {width: deque(maxlen=CHUNKS) for width in (*widths, MIXED)}
        self._unused = dict.fromkeys(self._chunks, 0)

    def note_step(self, seconds: float) -> None:
        """A decode step took so long."""
        self._steps.append(seconds)

    def note_chunk(self, width: int, seconds: float) -> None:
        """A prompt chunk took so long."""
        self._chunks[width].append(seconds)
        self._unused[width] = 0
        for other, measured in self._chunks.items():
            self._unused[other] += other != width
            if measured and self._unused[other] >= FORGOTTEN:
                measured.popleft()
                self._unused[other] = 0

    def note_mixed(self, seconds: float) -> None:
        """A decode step that read a piece of a prompt along took so long."""
        self.note_chunk(MIXED, seconds)

    @property
    def mixes(self) -> bool:
        """Prompts are read along with decode steps: no budget was given, and it takes no longer than it may, or than a
        step behind the smallest chunk, which reads less."""
        measured, usual = self._chunks[MIXED], self.usual_step
        longest = max(LONGEST_WAIT * usual, usual + self.seconds(self._widths[0]))
        fits = not measured or not usual or statistics.median(measured) <= longest
        return self.tokens is None and fits

    @property
    def usual_step(self) -> float:
        """Seconds; 0.0 before the first step."""
        return statistics.median(self._steps) if self._steps else 0.0

    def seconds(self, width: int) -> float:
        """What a chunk is expected to take. One that never ran: as long per token as the next smaller one, or nothing,
        so that the smallest is tried first."""
        measured = [known for known in self._widths if known <= width and self._chunks[known]]
        if not measured:
            return 0.0 if width == self._widths[0] else float("inf")
        return statistics.median(self._chunks[measured[-1]]) * width / measured[-1]

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

"""``ema``: choose the tier by a moving average of accepted drafts, as in SGLang's adaptive speculation.

It ignores costs. It serves as a baseline for ``cost``.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from speccompile.policies.base import Done, Ladder, Upcoming
from speccompile.policies.options import (
    by_rows,
    check_built,
    check_by_rows,
    check_candidates,
    check_number,
    check_whole,
    reached,
    text_of,
)


@dataclass(frozen=True)
class Ema:
    """Move between the tiers by a moving average of the mean number of accepted drafts of a batch, as SGLang does.

    SGLang's own default is ``Ema(candidates={1: (1, 3, 5, 7), 8: (0, 1, 3), 32: (0, 1), 64: (0,)}, down={1: -0.25,
    8: 0.0})``. SGLang pads a batch to the rows of a CUDA graph before it looks up its candidates; here the number of
    live rows is used. ``down``, ``up``, ``ceiling`` and ``candidates`` may be a mapping from the fewest live rows of a
    range, from 1 on, to a value. Each range of ``candidates`` has its own average.

    Args:
        alpha: weight of a new step in the average.
        warmup: steps before the first ``interval`` begins.
        interval: steps between two decisions.
        down: offset of the threshold below which the next smaller tier replaces the current one. The threshold is that
            tier's K - 0.5, or 0.5 for K=0.
        up: offset of the threshold above which the next larger tier replaces the current one. The threshold is K - 0.5.
        ceiling: if positive, upper bound of K as a multiple of the average, rounded up, unless K rises.
        initial: K of the first steps. Without it, and in ranges of ``candidates`` that lack it, the middle candidate.
        candidates: draft lengths to choose from; None is all tiers. Trees are left out, unless K=0 is the only chain:
            then the largest tree is a candidate, and its depth is its draft length.

    Raises:
        InvalidPolicy: a value is not valid.

    Source: SGLang 0.5.23, ``AdaptiveStepSlot`` in ``python/sglang/srt/speculative/adaptive_spec_params.py``.
    """

    alpha: float = 0.2
    warmup: int = 10
    interval: int = 5
    down: float | Mapping[int, float] = -0.25
    up: float | Mapping[int, float] = 0.0
    ceiling: float | Mapping[int, float] = 0.0
    initial: int | None = None
    candidates: tuple[int, ...] | Mapping[int, tuple[int, ...]] | None = None

    def __post_init__(self) -> None:
        check_number("ema", "alpha", self.alpha, above=0.0, most=1.0)
        check_whole("ema", "warmup", self.warmup, 0)
        check_whole("ema", "interval", self.interval, 1)
        check_by_rows("ema", "down", self.down)
        check_by_rows("ema", "up", self.up)
        check_by_rows("ema", "ceiling", self.ceiling, least=0.0)
        if self.initial is not None:
            check_whole("ema", "initial", self.initial, 0)
        check_candidates("ema", self.candidates, by_rows=True)

    def __str__(self) -> str:
        return text_of("ema", self)

    @property
    def uses_costs(self) -> bool:
        """False: tiers are not timed."""
        return False

    def check(self, draft_lens: Collection[int]) -> None:
        """Check that the candidates and the initial draft length were built.

        Raises:
            UnknownTier: a draft length was not built.
        """
        for candidates in by_rows(self.candidates).values():
            check_built(candidates or (), draft_lens)
        check_built([] if self.initial is None else [self.initial], draft_lens)

    def start(self, ladder: Ladder) -> EmaChooser:
        """Return a chooser over the candidates, or over all tiers, without history."""
        ranges = by_rows(self.candidates)
        return EmaChooser({rows: EmaRange(self, rows, ranges[rows] or ladder.rungs, ladder) for rows in ranges})


class EmaRange:
    """Average and tier of one range of row counts.

    Args:
        options: of the policy.
        rows: the fewest live rows of the range.
        candidates: tiers of the range, ascending.
        ladder: the tiers that were built.

    Attributes:
        draft_len: the tier to run.
        average: moving average of the accepted drafts of a row and step. Steps without drafts do not change it.
    """

    def __init__(self, options: Ema, rows: int, candidates: tuple[int, ...], ladder: Ladder) -> None:
        self._options = options
        self._candidates = candidates
        self._lengths = [ladder.most_accepted(tier) for tier in candidates]
        self._down = reached(by_rows(options.down), rows)
        self._up = reached(by_rows(options.up), rows)
        self._ceiling = reached(by_rows(options.ceiling), rows)
        middle = candidates[len(candidates) // 2]
        self.draft_len = options.initial if options.initial in candidates else middle
        self.average = float(self._lengths[candidates.index(self.draft_len)] - 1)
        self._steps = 0

    def note(self, accepted: Collection[int]) -> None:
        """Add a step's accepted drafts by row to the average, and choose the next tier if a decision is due."""
        if not accepted:
            return
        options = self._options
        if self.draft_len:
            mean = sum(accepted) / len(accepted)
            self.average = (1 - options.alpha) * self.average + options.alpha * mean
        self._steps += 1
        since = self._steps - options.warmup
        if since > 0 and since % options.interval == 0:
            self.draft_len = self._next()

    def _next(self) -> int:
        lengths, before = self._lengths, self._candidates.index(self.draft_len)
        at = before
        if lengths[before] == 0:
            return self._probe(at)
        while at > 0 and self.average <= self._drop_below(lengths[at - 1]):
            at -= 1
        if at == before:
            while at + 1 < len(lengths) and self.average > lengths[at] - 0.5 + self._up:
                at += 1
        if self._ceiling and at <= before:
            highest = max(1, math.ceil(self.average * self._ceiling))
            while at > 0 and lengths[at] > highest:
                at -= 1
        return self._candidates[at]

    def _probe(self, at: int) -> int:
        """Try the next tier. Without drafts there is no acceptance to decide by."""
        target = min(at + 1, len(self._candidates) - 1)
        if self._lengths[target] and self.average < 0:
            # The range began at K=0 and has no history.
            self.average = float(self._lengths[target] - 1)
        return self._candidates[target]

    def _drop_below(self, smaller: int) -> float:
        return (smaller - 0.5 if smaller else 0.5) + self._down


class EmaChooser:
    """Chooser of :class:`Ema`.

    Args:
        ranges: one for each range of rows, by its fewest live rows.
    """

    def __init__(self, ranges: Mapping[int, EmaRange]) -> None:
        self._ranges = ranges

    def choose(self, upcoming: Upcoming) -> int:
        """The current draft length for the number of live rows."""
        return reached(self._ranges, len(upcoming.rows)).draft_len

    def note(self, done: Done) -> None:
        """Learn from the accepted drafts of a step."""
        reached(self._ranges, len(done.requests)).note(done.accepted)

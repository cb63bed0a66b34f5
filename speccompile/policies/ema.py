"""``ema``: tiers by a moving average of accepted drafts, as SGLang's adaptive speculation chooses them.

After SGLang's ``adaptive_spec_params.py``: signal, constants and thresholds are its own. It knows no costs; it is here
to be compared with.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from speccompile.policies.base import Done, Ladder, Upcoming
from speccompile.policies.options import check_built, check_candidates, check_number, check_whole, text_of

#: SGLang does not say how often it tries again from K=0; this many steps.
PROBE_EVERY = 50


@dataclass(frozen=True)
class Ema:
    """Moves one tier up or down by the mean number of accepted drafts of a batch.

    Args:
        alpha: how much of a new step counts.
        warmup: steps without a decision at the start.
        interval: steps between two decisions.
        down, up: what is added to the thresholds ``smaller tier - 0.5`` (0.5 if that is K=0) and ``tier - 0.5``.
        candidates: draft lengths to choose from; None is all tiers. By live rows ({1: (1, 3, 7), 8: (0, 1)}), the
            largest that is reached counts, and each has an average of its own.
    """

    alpha: float = 0.2
    warmup: int = 10
    interval: int = 5
    down: float = -0.25
    up: float = 0.0
    candidates: tuple[int, ...] | Mapping[int, tuple[int, ...]] | None = None

    def __post_init__(self) -> None:
        check_number("ema", "alpha", self.alpha, above=0.0, most=1.0)
        check_whole("ema", "warmup", self.warmup, 0)
        check_whole("ema", "interval", self.interval, 1)
        check_number("ema", "down", self.down)
        check_number("ema", "up", self.up)
        check_candidates("ema", self.candidates, by_rows=True)

    def __str__(self) -> str:
        return text_of("ema", self)

    @property
    def uses_costs(self) -> bool:
        return False

    def check(self, draft_lens: Collection[int]) -> None:
        for candidates in self._by_rows(tuple(draft_lens)).values():
            check_built(candidates, draft_lens)

    def start(self, ladder: Ladder) -> EmaChooser:
        by_rows = self._by_rows(ladder.draft_lens)
        return EmaChooser(self, {rows: _Average(candidates) for rows, candidates in by_rows.items()})

    def _by_rows(self, draft_lens: tuple[int, ...]) -> dict[int, tuple[int, ...]]:
        if self.candidates is None:
            return {1: tuple(sorted(draft_lens))}
        return dict(self.candidates) if isinstance(self.candidates, Mapping) else {1: self.candidates}


class _Average:
    """Of one range of row counts."""

    def __init__(self, candidates: tuple[int, ...]) -> None:
        self.candidates = candidates
        self.at = len(candidates) - 1
        self.value: float | None = None
        self.steps = 0

    @property
    def draft_len(self) -> int:
        return self.candidates[self.at]


class EmaChooser:
    """See :class:`Ema`."""

    def __init__(self, options: Ema, averages: dict[int, _Average]) -> None:
        self._options = options
        self._averages = averages

    def choose(self, upcoming: Upcoming) -> int:
        return self._of(len(upcoming.rows)).draft_len

    def note(self, done: Done) -> None:
        options, average = self._options, self._of(len(done.requests))
        average.steps += 1
        if not average.draft_len:
            # Nothing is accepted where nothing is drafted.
            if average.steps >= PROBE_EVERY and len(average.candidates) > 1:
                average.at, average.steps, average.value = 1, 0, None
            return
        accepted = sum(done.accepted) / len(done.accepted)
        seen = accepted if average.value is None else average.value
        average.value = seen + options.alpha * (accepted - seen)
        if average.steps >= options.warmup and average.steps % options.interval == 0:
            self._decide(average, average.value)

    def _decide(self, average: _Average, value: float) -> None:
        before = average.at
        if average.at > 0:
            smaller = average.candidates[average.at - 1]
            if value <= (smaller - 0.5 if smaller else 0.5) + self._options.down:
                average.at -= 1
        if average.at == before and average.at + 1 < len(average.candidates):
            average.at += value > average.draft_len - 0.5 + self._options.up
        if not average.draft_len:
            average.steps = 0

    def _of(self, rows: int) -> _Average:
        reached = [start for start in sorted(self._averages) if start <= rows]
        return self._averages[reached[-1]]

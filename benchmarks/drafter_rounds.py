"""Several rounds over the same prompts: the median run of each, and the ratio of a way to the best of others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from speccompile.cli.measure import Run

#: Number of times that prompts and rounds are drawn anew for an interval.
RESAMPLES = 4000
#: A category fails if the upper end of its interval is lower.
ENOUGH = 0.98

Runs = Mapping[str, Sequence[Run]]


def _decode_seconds(run: Run) -> float:
    return run.seconds - run.first_seconds


def median_runs(rounds: Sequence[Runs]) -> dict[str, list[Run]]:
    """Return, by name of the way, the run of each prompt whose decode time is the median of the rounds.

    With an even number of rounds it is the slower one in the middle.
    """

    def median(runs: Sequence[Run]) -> Run:
        return sorted(runs, key=_decode_seconds)[len(runs) // 2]

    return {name: list(map(median, zip(*(own[name] for own in rounds), strict=True))) for name in rounds[0]}


@dataclass(frozen=True)
class KeepsUp:
    """Speed of a way over the fastest of others, on the prompts of a category.

    Args:
        best: the fastest of the others, by the medians.
        ratio: of the medians.
        low, high: ends of the 95 % interval, over prompts and rounds that are drawn with replacement.
    """

    best: str
    ratio: float
    low: float
    high: float

    @property
    def enough(self) -> bool:
        """Whether the interval allows for :data:`ENOUGH`."""
        return self.high >= ENOUGH


def keeps_up(rounds: Sequence[Runs], way: str, others: Sequence[str], prompts: Sequence[int]) -> KeepsUp:
    """Compare ``way`` with the fastest of ``others``, over the prompts with these indices.

    All ways emit the same tokens, so speeds compare as times. Runs of one prompt in one round are drawn together.

    Source: Efron and Tibshirani, An Introduction to the Bootstrap, chapter 13 (percentile intervals).
    """
    seconds = {
        name: np.array([[_decode_seconds(own[name][index]) for index in prompts] for own in rounds])
        for name in (way, *others)
    }
    medians = {name: float(np.median(own, axis=0).sum()) for name, own in seconds.items()}
    best = min(others, key=medians.__getitem__)
    draw = np.random.default_rng(0)
    count = len(prompts)
    chosen = draw.integers(count, size=(RESAMPLES, 1, count))
    drawn = draw.integers(len(rounds), size=(RESAMPLES, len(rounds), count))
    totals = {name: np.median(seconds[name][drawn, chosen], axis=1).sum(axis=1) for name in (way, best)}
    low, high = np.quantile(totals[best] / totals[way], (0.025, 0.975))
    return KeepsUp(best, medians[best] / medians[way], float(low), float(high))

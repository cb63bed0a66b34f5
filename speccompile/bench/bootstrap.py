"""Intervals of ratios over prompts that are drawn with replacement."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

#: Number of times that the prompts are drawn anew.
RESAMPLES = 4000
#: Fewest prompts of which an interval means something.
FEWEST = 2
_ENDS = (0.025, 0.975)
#: Numbers that are drawn at once, a bound of memory.
_AT_ONCE = 4_000_000


@dataclass(frozen=True)
class Interval:
    """A value, and the ends of its 95 % interval; None where there are fewer than :data:`FEWEST` prompts."""

    value: float
    low: float | None
    high: float | None


def interval(sums: Sequence[Sequence[float]], of: Callable[[np.ndarray], np.ndarray], seed: int = 0) -> Interval:
    """The value of ``of`` over all prompts, with its percentile interval.

    Turns of one conversation are one prompt here: they are not independent.

    Args:
        sums: float ``[P, C]``: for each prompt, the numbers whose sums over prompts ``of`` combines.
        of: computes the value from sums, float ``[..., C] -> [...]``.

    Source: Efron and Tibshirani, An Introduction to the Bootstrap, chapter 13 (percentile intervals).
    """
    table = np.asarray(sums, dtype=np.float64)
    count = len(table)
    value = float(of(table.sum(0)))
    if count < FEWEST:
        return Interval(value, None, None)
    draw = np.random.default_rng(seed)
    values, at_once = [], max(1, _AT_ONCE // count)
    for begin in range(0, RESAMPLES, at_once):
        resamples = min(at_once, RESAMPLES - begin)
        # How often each prompt is drawn.
        weights = draw.multinomial(count, [1 / count] * count, size=resamples)
        values.append(of(weights @ table))
    low, high = np.nanquantile(np.concatenate(values), _ENDS)
    return Interval(value, float(low), float(high))


def quotient(above: int, below: int) -> Callable[[np.ndarray], np.ndarray]:
    """The ratio of two columns of sums; NaN where the denominator is 0."""

    def of(sums: np.ndarray) -> np.ndarray:
        denominator = sums[..., below]
        return np.divide(sums[..., above], denominator, out=np.full_like(denominator, np.nan), where=denominator > 0)

    return of


def speed_over(tokens: int, seconds: int, base_tokens: int, base_seconds: int) -> Callable[[np.ndarray], np.ndarray]:
    """The ratio of two speeds, from the columns of their tokens and seconds; NaN where one is not known."""

    def of(sums: np.ndarray) -> np.ndarray:
        above = sums[..., tokens] * sums[..., base_seconds]
        below = sums[..., seconds] * sums[..., base_tokens]
        return np.divide(above, below, out=np.full_like(below, np.nan), where=below > 0)

    return of

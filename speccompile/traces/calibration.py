"""Calibration of drafters' scores: how often drafts are accepted that have a score."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from speccompile.errors import InvalidInput

#: Number of ranges of scores, each as wide as the others.
BINS = 10


@dataclass(frozen=True)
class CalibrationBin:
    """Drafts whose scores are in one range.

    Args:
        low, high: ends of the range.
        score: their mean score.
        accepted: the share of them that was accepted.
    """

    low: float
    high: float
    drafts: int
    score: float
    accepted: float


@dataclass(frozen=True)
class CalibrationCurve:
    """Calibration of a line's scores.

    Args:
        drafts: number of drafts with scores.
        error: expected calibration error: the mean of ``abs(score - accepted)`` over the bins, weighted by drafts.
        brier: mean squared difference between a score and the outcome, 0 or 1.
    """

    drafts: int
    error: float
    brier: float
    bins: tuple[CalibrationBin, ...]


def calibration(scores: Sequence[float] | np.ndarray, accepted: Sequence[bool] | np.ndarray) -> CalibrationCurve | None:
    """The calibration of scores.

    Args:
        scores: float ``[n]``: for each judged draft, the probability that it and all drafts before it are accepted.
            NaN is a draft without a score, which is left out.
        accepted: bool ``[n]``: whether they were. Of a trace, these are the columns ``score`` and ``accepted`` of
            :attr:`TokenTrace.drafts`.

    Returns:
        The curve; None if no draft has a score.

    Raises:
        InvalidInput: the lengths differ, or a score is not a probability.

    Source: Guo et al., "On Calibration of Modern Neural Networks" (2017), section 2 (expected calibration error).
    """
    values, outcomes = np.asarray(scores, np.float64), np.asarray(accepted, np.float64)
    if values.shape != outcomes.shape or values.ndim != 1:
        reason = f"their shapes must be equal, and are {list(values.shape)} and {list(outcomes.shape)}"
        raise InvalidInput(name="scores and accepted", reason=reason)
    known = ~np.isnan(values)
    values, outcomes = values[known], outcomes[known]
    if not len(values):
        return None
    if values.min() < 0 or values.max() > 1:
        raise InvalidInput(
            name="scores", reason=f"they must be from 0 to 1, and reach {values.min()} and {values.max()}"
        )
    chosen = np.minimum((values * BINS).astype(int), BINS - 1)
    bins = []
    for index in range(BINS):
        inside = chosen == index
        if count := int(inside.sum()):
            means = float(values[inside].mean()), float(outcomes[inside].mean())
            bins.append(CalibrationBin(index / BINS, (index + 1) / BINS, count, *means))
    error = sum(item.drafts * abs(item.score - item.accepted) for item in bins) / len(values)
    return CalibrationCurve(len(values), error, float(((values - outcomes) ** 2).mean()), tuple(bins))

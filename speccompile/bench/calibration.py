"""Calibration of drafters' scores: how often drafts are accepted that have a score."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from speccompile.bench.answers import Steps

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


def calibration_of(requests: Iterable[Steps]) -> CalibrationCurve | None:
    """The calibration of the scores of ``requests``; None without scores.

    The score of draft i is the probability that it and all before it are accepted. The outcome is whether they were.

    Source: Guo et al., "On Calibration of Modern Neural Networks" (2017), section 2 (expected calibration error).
    """
    pairs = [
        (score, position < accepted)
        for steps in requests
        for scores, accepted, depth in zip(steps.scores, steps.accepted, steps.depths, strict=True)
        for position, score in enumerate(scores[:depth])
    ]
    if not pairs:
        return None
    scores, outcomes = np.array(pairs, dtype=np.float64).T
    chosen = np.minimum((scores * BINS).astype(int), BINS - 1)
    bins = []
    for index in range(BINS):
        inside = chosen == index
        if count := int(inside.sum()):
            means = float(scores[inside].mean()), float(outcomes[inside].mean())
            bins.append(CalibrationBin(index / BINS, (index + 1) / BINS, count, *means))
    error = sum(item.drafts * abs(item.score - item.accepted) for item in bins) / len(pairs)
    return CalibrationCurve(len(pairs), error, float(((scores - outcomes) ** 2).mean()), tuple(bins))

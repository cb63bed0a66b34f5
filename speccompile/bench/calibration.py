"""Calibration of the scores of a line's drafters."""

from __future__ import annotations

from collections.abc import Iterable

from speccompile.bench.answers import Steps
from speccompile.traces.calibration import CalibrationCurve, calibration


def calibration_of(requests: Iterable[Steps]) -> CalibrationCurve | None:
    """The calibration of the scores of all judged drafts of ``requests``; None without scores."""
    pairs = [
        (score, position < accepted)
        for steps in requests
        for scores, accepted, depth in zip(steps.scores, steps.accepted, steps.depths, strict=True)
        for position, score in enumerate(scores[:depth])
    ]
    return calibration([score for score, _ in pairs], [accepted for _, accepted in pairs])

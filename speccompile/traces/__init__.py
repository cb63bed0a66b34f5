"""Traces with tokens, which ``spec.record_trace(path, tokens=True)`` writes: columns, and other drafters over them."""

from speccompile.traces.calibration import CalibrationBin, CalibrationCurve, calibration
from speccompile.traces.reader import TokenTrace, TracedRequest, read_token_trace
from speccompile.traces.replay import Replay, ReplayedRequest, replay

__all__ = [
    "CalibrationBin",
    "CalibrationCurve",
    "Replay",
    "ReplayedRequest",
    "TokenTrace",
    "TracedRequest",
    "calibration",
    "read_token_trace",
    "replay",
]

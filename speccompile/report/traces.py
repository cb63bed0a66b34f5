"""A recorded trace as data."""

from __future__ import annotations

from speccompile.report.run_data import TraceReport, TraceStep
from speccompile.runtime.trace_reader import RecordedRun


def trace_report(trace: RecordedRun, name: str) -> TraceReport:
    """Steps of ``trace`` under the name ``name``."""
    steps = tuple(
        TraceStep(step.draft_len, step.requests, step.proposed, step.accepted, step.emitted, step.milliseconds)
        for step in trace.steps
    )
    return TraceReport(name, trace.draft_lens, steps)

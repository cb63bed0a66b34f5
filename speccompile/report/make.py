"""Creates a report of a speculator: measures, decodes and collects."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from speccompile.compiler.build import Build
from speccompile.compiler.config import BuildConfig
from speccompile.graph.keys import Kind
from speccompile.report.collect import collect, measured
from speccompile.report.data import Report
from speccompile.report.decode import decode_at_each_tier
from speccompile.report.measure import StepTimes
from speccompile.report.run_data import Decoded, TraceReport
from speccompile.report.source import of_build
from speccompile.report.traces import trace_report
from speccompile.runtime.engine import Engine
from speccompile.runtime.trace_reader import read_trace
from speccompile.utils.progress import task


def make_report(
    config: BuildConfig,
    build: Build,
    engine: Engine,
    explanation: Mapping[str, str],
    *,
    kind: Kind,
    measure: bool,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    trace: str | os.PathLike[str] | None,
) -> Report:
    """Create the report of a build. Other arguments are those of :meth:`speccompile.Speculator.report`.

    Args:
        kind: kind of the executables to report.

    Raises:
        InvalidTrace: ``trace`` cannot be read.
        InsideStep: the call comes from a callback of a step.
    """
    engine.loop.refuse_callback("report()")
    recorded: TraceReport | None = None
    if trace is not None:
        recorded = trace_report(read_trace(trace), Path(trace).name)
    source = of_build(config, build, engine, explanation, kind)
    times: dict[int, StepTimes] = {}
    bandwidth = None
    if measure:
        with task("measure the steps"), engine.loop.exclusive():
            times, bandwidth = measured(source)
    decoded: dict[int, Decoded] = {}
    if prompts:
        with task("decode the prompts at each tier"):
            decoded, own = decode_at_each_tier(engine, prompts, max_new_tokens)
        recorded = recorded or own
    return collect(source, times=times, bandwidth=bandwidth, decoded=decoded, stats=engine.stats, trace=recorded)

"""Collects a report from a build."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from importlib.metadata import version

import torch
import transformers

from speccompile.compiler.layout import split_state
from speccompile.compiler.pipelines import drafter_pipeline, model_pipeline, step_pipeline
from speccompile.graph.stage import Stages
from speccompile.graph.step_form import StepForm
from speccompile.graph.tree import Tree
from speccompile.lowering.collective_list import CollectiveCall, collectives_called
from speccompile.lowering.kernel_list import kernels_called
from speccompile.passes.base import Pass
from speccompile.report.bandwidth import read_bandwidth
from speccompile.report.buffers import buffers_of
from speccompile.report.costs import floor_ms, kernel_rows, region_costs, times_of
from speccompile.report.data import FORMAT, Executable, Machine, Report, Span, Subject, TierReport, TreeShape
from speccompile.report.fallbacks import fallbacks_of
from speccompile.report.measure import CONTEXT, RUNS_IN_PARTS, StepTimes, measure_steps
from speccompile.report.memory import memory_of
from speccompile.report.names import short_names
from speccompile.report.program_data import Collective, Program
from speccompile.report.programs import bodies_of, program
from speccompile.report.run_data import AcceptanceCounts, Decoded, Measured, RegionCost, TraceReport
from speccompile.report.source import ReportSource
from speccompile.report.traffic import Reads
from speccompile.report.verdict import explained, verdict
from speccompile.runtime.stats import Stats
from speccompile.utils.machine import processor_name


def collect(
    source: ReportSource,
    *,
    times: Mapping[int, StepTimes] | None = None,
    bandwidth: float | None = None,
    decoded: Mapping[int, Decoded] | None = None,
    stats: Stats | None = None,
    trace: TraceReport | None = None,
) -> Report:
    """Collect the report of ``source``.

    Args:
        times, decoded: by draft length; None if nothing was measured or decoded.
        bandwidth: bytes per second, from :func:`~speccompile.report.bandwidth.read_bandwidth`.
        stats: of all requests so far.
    """
    times, decoded = times or {}, decoded or {}
    shown = [draft_len for draft_len, rows in source.tiers if rows == source.rows]
    names = short_names(shown)
    tiers = explained([_tier(source, k, names, times, bandwidth, decoded.get(k)) for k in shown])
    acceptance = None if stats is None or not stats.steps else _acceptance(stats, names)
    fallbacks = tuple(fallbacks_of(source.config, source.info, source.observed))
    config = source.config
    of_drafter = {spec.name for spec in (*config.mode.state(config.tiers), *split_state(config))}
    buffers = buffers_of(source.layout, source.observed, of_drafter)
    ports = {
        port.name: port
        for stages in source.tiers.values()
        for graph in (stages.step.last.graph, *(drafter.last.graph for drafter in stages.drafters))
        for port in graph.ports.values()
    }
    return Report(
        format=FORMAT,
        subject=_subject(source),
        machine=_machine(source, bandwidth),
        verdict=verdict(tiers, fallbacks, acceptance, trace),
        fallbacks=fallbacks,
        model=_model_program(source),
        tiers=tiers,
        executables=tuple(_executables(source)),
        buffers=buffers,
        memory=memory_of(source.weights, source.drafter_weights, ports.values(), buffers, source.layout, source.packs),
        build=_build(source),
        acceptance=acceptance,
        trace=trace,
    )


def measured(source: ReportSource) -> tuple[dict[int, StepTimes], float]:
    """Measure the steps of the reported tiers, and the bandwidth. No other step may run meanwhile."""
    arena = next(iter(source.executables.values())).arena
    tiers = {draft_len: tier for (draft_len, rows), tier in source.executables.items() if rows == source.rows}
    times = measure_steps(arena, tiers, source.config.backend, source.model.last.graph)
    return times, read_bandwidth(source.info.device)


def _subject(source: ReportSource) -> Subject:
    info, config = source.info, source.config
    return Subject(
        model=info.name,
        layers=info.num_layers,
        dtype=str(info.dtype).removeprefix("torch."),
        mode=config.mode.name,
        backend=source.backend,
        max_batch=config.max_batch,
        max_len=config.max_len,
        explanation=dict(source.explanation),
    )


def _machine(source: ReportSource, bandwidth: float | None) -> Machine:
    versions = {
        "speccompile": version("speccompile"),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "Python": platform.python_version(),
    }
    return Machine(str(source.info.device), processor_name(), torch.get_num_threads(), bandwidth, versions)


def _model_passes(source: ReportSource) -> list[Pass]:
    return list(model_pipeline(source.config, source.packs).passes)


def _model_program(source: ReportSource) -> Program:
    reads = Reads(source.layout, source.rows, CONTEXT)
    return program("model", list(source.model.values()), _model_passes(source), reads)


def _tier(
    source: ReportSource,
    draft_len: int,
    names: Mapping[int, str],
    all_times: Mapping[int, StepTimes],
    bandwidth: float | None,
    decoded: Decoded | None,
) -> TierReport:
    rows, config, times = source.rows, source.config, all_times.get(draft_len)
    stages = source.tiers[draft_len, rows]
    graph = stages.step.last.graph
    context = CONTEXT if times is None else times.context
    reads = Reads(source.layout, rows, context)
    compiled = bool(source.code(graph))
    of_calls = None if times is None or not times.of_calls else times_of(graph, times, compiled=compiled)
    form = config.form(draft_len, rows, source.kind)
    passes = [*_model_passes(source), *step_pipeline(config, form).passes]
    own = [stage for name, stage in stages.step.items() if name not in source.model]
    shown = program(form.name, own, passes, reads, base=source.model.last, times=of_calls)
    nodes = [node for node in shown.nodes if node.until is None]
    bodies = bodies_of(graph, reads, of_calls)
    regions = region_costs(nodes, bodies, times, bandwidth)
    if times is not None and decoded is not None:
        step_ms = {names[k]: step.fastest for k, step in all_times.items()}
        regions = (*regions, RegionCost("host", _host_ms(decoded, step_ms), 0, None))
    drafters = [drafter.last.graph for drafter in stages.drafters]
    calls = kernels_called(graph, graph.device.type, source.code(graph, *drafters), drafters)
    nbytes = sum(cost.nbytes for cost in regions)
    return TierReport(
        name=names[draft_len],
        draft_len=int(draft_len),
        rows=rows,
        width=graph.sizes["T"],
        kind=source.kind,
        tree=_tree(draft_len),
        program=shown,
        bodies=bodies,
        drafters=tuple(_drafter_program(source, draft_len, drafter, reads) for drafter in stages.drafters),
        kernels=kernel_rows(calls, nodes, bodies, bandwidth),
        regions=regions,
        nbytes=nbytes,
        floor_ms=floor_ms(nbytes, bandwidth),
        measured=None if times is None else _measured(times, compiled),
        decoded=decoded,
        cost=None,
        buffers_read=tuple(sorted({name for node in nodes for name in node.reads})),
        buffers_written=tuple(sorted({name for node in nodes for name in node.writes})),
        collectives=tuple(_collective(call) for graph in (*drafters, graph) for call in collectives_called(graph)),
    )


def _collective(call: CollectiveCall) -> Collective:
    dtype = str(call.dtype).removeprefix("torch.")
    return Collective(call.caller, call.name, call.calls, call.shape, dtype, call.nbytes)


def _host_ms(decoded: Decoded, step_ms: Mapping[str, float]) -> float:
    """Milliseconds of a decoded step outside of its executable. ``step_ms``: by the names of the tiers."""
    steps = sum(decoded.tier_steps.values())
    inside = sum(count * step_ms[name] for name, count in decoded.tier_steps.items())
    return max(0.0, decoded.step_ms - inside / steps) if steps else 0.0


def _measured(times: StepTimes, compiled: bool) -> Measured:
    how = f"Parts are those of the fastest of {RUNS_IN_PARTS} runs whose calls were timed one by one."
    if not times.of_calls:
        how = "The parts of a step are measured where it runs only on the host."
    elif compiled:
        how += (
            " Inside of a compiled layer, linears and attention were timed in a run op by op, with the same kernels; "
            "'elementwise' is the rest of the compiled layer."
        )
    return Measured(times.fastest, times.median, len(times.runs), times.context, how)


def _drafter_program(source: ReportSource, draft_len: int, stages: Stages, reads: Reads) -> Program:
    pipeline = drafter_pipeline(source.config, source.config.form(draft_len, source.rows, source.kind))
    passes = [*_model_passes(source), *(() if pipeline is None else pipeline.passes)]
    own = [stage for name, stage in stages.items() if name not in source.model]
    return program(stages.last.tier, own, passes, reads, base=source.model.last)


def _tree(draft_len: int) -> TreeShape | None:
    if not isinstance(draft_len, Tree):
        return None
    return TreeShape(int(draft_len), draft_len.depth, draft_len.branches, draft_len.parents, draft_len.draw())


def _executables(source: ReportSource) -> list[Executable]:
    named = [(StepForm(*name, source.kind).name, stages.step) for name, stages in source.tiers.items()]
    named += [(f"prefill T={width}", stages) for width, stages in source.prefill.items()]
    found = []
    for name, stages in named:
        graph = stages.last.graph
        counts = graph.op_counts()
        bodies = {body: count for body, count in counts.items() if body in graph.bodies}
        found.append(Executable(name, graph.sizes["B"], graph.sizes["T"], sum(counts.values()), bodies))
    return found


def _build(source: ReportSource) -> Span | None:
    if not source.seconds:
        return None
    passes = tuple(Span(stage.name, stage.seconds) for stage in source.model.values())
    parts = tuple(
        Span(name, seconds, passes if name == "capture and passes" else ()) for name, seconds in source.seconds.items()
    )
    return Span("build", sum(source.seconds.values()), parts)


def _acceptance(stats: Stats, names: Mapping[int, str]) -> AcceptanceCounts:
    return AcceptanceCounts(
        acceptance_length=stats.acceptance_length,
        steps=stats.steps,
        emitted=stats.emitted_tokens,
        proposed_at=tuple(stats.proposed_at),
        accepted_at=tuple(stats.accepted_at),
        tier_steps={names[draft_len]: count for draft_len, count in sorted(stats.tier_steps.items())},
        tier_seconds={names[draft_len]: seconds for draft_len, seconds in sorted(stats.tier_seconds.items())},
    )

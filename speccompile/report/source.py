"""Input of a report: a build with its engine, or only its stages if nothing was lowered."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from speccompile.compiler.build import Build
from speccompile.compiler.config import BuildConfig
from speccompile.compiler.frontend import BuiltStages
from speccompile.graph.keys import Kind
from speccompile.graph.stage import Stages
from speccompile.graph.state import Layout
from speccompile.graph.step_graph import StepGraph
from speccompile.graph_capture.model_info import ModelInfo
from speccompile.graph_capture.observe import Observation
from speccompile.lowering.tier import Tier
from speccompile.ops.cpu.packing import WeightPacks
from speccompile.runtime.engine import Engine


@dataclass(frozen=True)
class StepStages:
    """Stages of a tier, and of the drafters that run before it, in order."""

    step: Stages
    drafters: tuple[Stages, ...] = ()


@dataclass(frozen=True)
class ReportSource:
    """Input of a report.

    Args:
        kind: kind of the executables to report.
        tiers: stages by draft length and row count.
        executables: bound tiers by the same keys; empty if nothing was lowered.
        backend: name of the backend; None if nothing was lowered.
        seconds: duration of each part of the build.
    """

    config: BuildConfig
    info: ModelInfo
    layout: Layout
    observed: Observation
    kind: Kind
    model: Stages
    tiers: Mapping[tuple[int, int], StepStages]
    prefill: Mapping[int, Stages]
    weights: Mapping[str, torch.Tensor]
    drafter_weights: Mapping[str, torch.Tensor]
    packs: WeightPacks
    executables: Mapping[tuple[int, int], Tier] = field(default_factory=dict)
    backend: str | None = None
    seconds: Mapping[str, float] = field(default_factory=dict)
    explanation: Mapping[str, str] = field(default_factory=dict)

    @property
    def rows(self) -> int:
        """Row count of the reported tiers: the largest."""
        return max(rows for _, rows in self.tiers)

    def code(self, *graphs: StepGraph) -> dict[str, str]:
        """Modules that call the kernels of compiled bodies."""
        found: dict[str, str] = {}
        for graph in graphs if self.backend else ():
            found |= self.config.backend.compiled_code(graph)
        return found


def of_build(
    config: BuildConfig, build: Build, engine: Engine, explanation: Mapping[str, str], kind: Kind
) -> ReportSource:
    """Input from a build. ``kind`` must be among the engine's executables."""
    tiers = {(draft_len, rows): tier for (draft_len, rows, own), tier in engine.tiers.items() if own == kind}
    return ReportSource(
        config=config,
        info=build.info,
        layout=engine.arena.layout,
        observed=build.observed,
        kind=kind,
        model=build.model,
        tiers={
            name: StepStages(tier.stages, tuple(segment.stages for segment in tier.segments))
            for name, tier in tiers.items()
        },
        prefill={width: tier.stages for (width, own), tier in engine.prefill_tiers.items() if own == kind},
        weights=build.weights,
        drafter_weights={} if build.drafter is None else build.drafter.weights,
        packs=build.packs,
        executables=tiers,
        backend=config.backend.name,
        seconds=build.seconds,
        explanation=explanation,
    )


def of_stages(info: ModelInfo, built: BuiltStages, kind: Kind) -> ReportSource:
    """Input from stages that were not lowered."""
    config = built.config
    steps = {name[:2]: step for name, step in built.tiers.items() if name[2] == kind}
    own = {name: step.drafter.stages for name, step in sorted(steps.items()) if step.drafter is not None}

    def drafters(draft_len: int, rows: int) -> tuple[Stages, ...]:
        return tuple(
            stages
            for (drafted, other), stages in own.items()
            if other == rows and (drafted == draft_len or (config.drafts_in_segments and drafted < draft_len))
        )

    return ReportSource(
        config=config,
        info=info,
        layout=built.arena.layout,
        observed=built.observed,
        kind=kind,
        model=built.model,
        tiers={name: StepStages(step.stages, drafters(*name)) for name, step in steps.items()},
        prefill={name[0]: step.stages for name, step in built.prefill.items() if name[1] == kind},
        weights=built.model["capture"].graph.weights,
        drafter_weights={} if built.drafter is None else built.drafter.weights,
        packs=built.packs,
    )

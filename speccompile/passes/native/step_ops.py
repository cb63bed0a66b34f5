"""Steps that call ops of ours where others spell out what those compute: commit and n-gram match."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import speccompile.ops  # noqa: F401  defines the ops
from speccompile.graph.step_graph import StepGraph
from speccompile.passes.base import Changes, Facts, Pass, PassRegion, facts

STEP_OPS = "step_ops"
#: The fact that each launch costs time, so that what stands outside of the layers is joined.
FEW_LAUNCHES = "few_launches"


@dataclass(frozen=True)
class UseStepOps(Pass):
    """From here on passes insert an op of ours where there is one: where there is a kernel for each, Triton's or C++.

    Elsewhere they insert what the op computes, so that it prints as what it does.
    """

    name: ClassVar[str] = "use_step_ops"
    looks_for: ClassVar[str] = "a step"
    region: ClassVar[PassRegion] = "model"
    requires: ClassVar[Facts] = facts("captured")
    provides: ClassVar[Facts] = facts(STEP_OPS)
    optional: ClassVar[bool] = True

    def run(self, graph: StepGraph) -> Changes:
        return Changes(0, "commit and n-gram match will be single ops")


def uses_step_ops(graph: StepGraph) -> bool:
    """Whether the step calls this package's C++ ops."""
    return STEP_OPS in graph.facts

"""Choice of the kernels for the recurrences of a target."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

import speccompile.ops  # noqa: F401  defines the ops
from speccompile.graph.step_graph import StepGraph
from speccompile.passes.base import Changes, Facts, Pass, PassRegion, facts
from speccompile.passes.target.choose_native import choose_native

RECURRENCES = ("causal_conv_", "gated_delta_rule_", "selective_scan_")


@dataclass(frozen=True)
class ChooseRecurrence(Pass):
    """Chooses the C++ ops if ``native``, else their references in PyTorch. Both compute position by position."""

    native: bool = False

    name: ClassVar[str] = "choose_recurrence"
    looks_for: ClassVar[str] = "recurrences"
    region: ClassVar[PassRegion] = "model"
    requires: ClassVar[Facts] = facts("captured")
    provides: ClassVar[Facts] = facts("recurrences_chosen")

    def run(self, graph: StepGraph) -> Changes:
        ops = torch.ops.speccompile
        native = {getattr(ops, name).default: getattr(ops, f"native_{name}").default for name in RECURRENCES}
        if self.native:
            return choose_native(graph, native)
        found = sum(node.target in native for node in graph.graph.nodes)
        return Changes(found, f"{found} place by place, in PyTorch")

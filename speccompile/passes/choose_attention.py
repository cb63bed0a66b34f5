"""Which kernel the semantic attention op becomes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from speccompile.graph_capture.graph import StepGraph
from speccompile.passes.base import Changes, Facts, Pass, facts


@dataclass(frozen=True)
class ChooseAttention(Pass):
    """``fixed_order`` takes the kernel whose result for a query does not depend on where in a step it stands."""

    fixed_order: bool = False

    name: ClassVar[str] = "choose_attention"
    looks_for: ClassVar[str] = "speccompile::attention"
    requires: ClassVar[Facts] = facts("captured")
    provides: ClassVar[Facts] = facts("attention_chosen")

    def run(self, graph: StepGraph) -> Changes:
        ops = torch.ops.speccompile
        kernel = ops.attention_fixed_order.default if self.fixed_order else ops.attention.default
        found = graph.graph.find_nodes(op="call_function", target=ops.attention.default)
        for node in found:
            node.target = kernel
        return Changes(len(found), f"{len(found)} calls of {kernel}")


@dataclass(frozen=True)
class KeepAttention(Pass):
    """A model captured with its own attention has no semantic op to choose a kernel for."""

    name: ClassVar[str] = "choose_attention"
    looks_for: ClassVar[str] = "the model's own attention"
    requires: ClassVar[Facts] = facts("captured")
    provides: ClassVar[Facts] = facts("attention_chosen")
    optional: ClassVar[bool] = True

    def run(self, graph: StepGraph) -> Changes:
        return Changes(0, "the model's own attention, over a copy of each row's whole cache")

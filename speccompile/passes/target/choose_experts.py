"""Which kernel the linears of chosen experts become."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

import speccompile.ops  # noqa: F401  defines the ops
from speccompile.graph.step_graph import StepGraph
from speccompile.passes.base import Changes, Facts, Pass, facts
from speccompile.passes.native.choose_native import choose_native

ops = torch.ops.speccompile


@dataclass(frozen=True)
class ChooseExperts(Pass):
    """``native``: the C++ op, which reads the weights of each chosen expert once; else its reference in PyTorch, or on
    CUDA a Triton kernel. Weights of experts are read as the model has them: packed, they would be a second copy of most
    of it."""

    native: bool = False

    name: ClassVar[str] = "choose_experts"
    looks_for: ClassVar[str] = "speccompile::expert_linear"
    requires: ClassVar[Facts] = facts("captured")
    provides: ClassVar[Facts] = facts("experts_chosen")

    def run(self, graph: StepGraph) -> Changes:
        op, native = ops.expert_linear.default, ops.native_expert_linear.default
        chosen = choose_native(graph, {op: native if self.native else op})
        kernel = ops.native_expert_linear if self.native else ops.expert_linear
        note = f"{chosen.matched} linears call {kernel}; their weights are the model's own, neither packed nor rounded"
        return Changes(chosen.matched, note)


def has_experts(graph: StepGraph) -> bool:
    """Whether a captured graph has linears of experts."""
    return bool(graph.graph.find_nodes(op="call_function", target=ops.expert_linear.default))

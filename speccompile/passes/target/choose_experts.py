"""Choice of the kernel for the linears of chosen experts."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

import speccompile.ops  # noqa: F401  defines the ops
from speccompile.graph.port import Port
from speccompile.graph.step_graph import StepGraph
from speccompile.graph.verify import views_of
from speccompile.passes.base import Changes, Facts, Pass, PassRegion, facts
from speccompile.passes.target.choose_native import choose_native
from speccompile.utils.torch_private import OpOverload

ops = torch.ops.speccompile


@dataclass(frozen=True)
class ChooseExperts(Pass):
    """``native``: the C++ op, which reads the weights of each chosen expert once; else its reference in PyTorch, or on
    CUDA a Triton kernel. Weights of experts are read as the model has them: packed, they would be a second copy of most
    of it."""

    native: bool = False

    name: ClassVar[str] = "choose_experts"
    looks_for: ClassVar[str] = "speccompile::expert_linear"
    region: ClassVar[PassRegion] = "model"
    requires: ClassVar[Facts] = facts("captured")
    provides: ClassVar[Facts] = facts("experts_chosen")

    def run(self, graph: StepGraph) -> Changes:
        op, native = ops.expert_linear.default, ops.native_expert_linear.default
        size = sum(math.prod(port.shape) * port.dtype.itemsize for port in _read_by(graph, op)) / 2**20
        chosen = choose_native(graph, {op: native if self.native else op})
        kernel = ops.native_expert_linear if self.native else ops.expert_linear
        note = (
            f"{chosen.matched} linears call {kernel}; their weights, {size:.1f} MiB, are the model's own, neither "
            "packed nor rounded"
        )
        return Changes(chosen.matched, note)


def _read_by(graph: StepGraph, op: OpOverload) -> Iterable[Port]:
    """The ports of the weights of all calls of ``op``, each once. Some models read them through views."""
    found: dict[str, Port] = {}
    for node in graph.graph.find_nodes(op="call_function", target=op):
        weight: Any = node.args[2]
        while weight is not None and weight.op != "placeholder":
            weight = next(views_of(weight), None)
        # A value that is computed from weights is not a weight.
        if weight is not None:
            found[weight.name] = graph.ports[weight.name]
    return found.values()


def has_experts(graph: StepGraph) -> bool:
    """Whether a captured graph has linears of experts."""
    return bool(graph.graph.find_nodes(op="call_function", target=ops.expert_linear.default))

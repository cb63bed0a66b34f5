"""Which form a linear takes: both compute the same, and which is faster depends on the machine's BLAS."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import fx

from speccompile.graph_capture.graph import StepGraph
from speccompile.passes.base import Changes, Facts, Pass, facts

aten = torch.ops.aten


@dataclass(frozen=True)
class ChooseLinear(Pass):
    """``weight_stationary`` writes ``x @ w.T`` as ``(w @ x.T).T``: the weight becomes the left operand.

    For the few rows of a decoding step some BLAS libraries then read the weight once instead of blocking for a
    product that is large in both directions.
    """

    weight_stationary: bool = False

    name: ClassVar[str] = "choose_linear"
    looks_for: ClassVar[str] = "aten::linear"
    requires: ClassVar[Facts] = facts("captured")
    provides: ClassVar[Facts] = facts("linears_chosen")

    def run(self, graph: StepGraph) -> Changes:
        found = graph.graph.find_nodes(op="call_function", target=aten.linear.default)
        if not self.weight_stationary:
            return Changes(len(found), f"{len(found)} stock linears")
        for node in found:
            _rewrite(graph, node)
        return Changes(len(found), f"{len(found)} weight-stationary linears")


def _rewrite(graph: StepGraph, node: fx.Node) -> None:
    x, weight, *rest = node.args
    bias = rest[0] if rest else node.kwargs.get("bias")
    assert isinstance(x, fx.Node)
    owner = {key: value for key, value in node.meta.items() if key in ("layer", "pass")}
    features = x.meta["val"].shape[-1]

    def call(target: torch._ops.OpOverload, *args: object) -> fx.Node:
        made = graph.graph.call_function(target, args)  # type: ignore[arg-type]
        made.meta = dict(owner)
        return made

    with graph.graph.inserting_before(node):
        sizes = [call(aten.sym_size.int, x, dim) for dim in range(x.meta["val"].ndim - 1)]
        rows = call(aten.reshape.default, x, [-1, features])
        product = call(aten.mm.default, weight, call(aten.t.default, rows))
        result = call(aten.view.default, call(aten.t.default, product), [*sizes, weight.meta["val"].shape[0]])  # type: ignore[union-attr]
        if bias is not None:
            result = call(aten.add.Tensor, result, bias)
    graph.replace(node, result)

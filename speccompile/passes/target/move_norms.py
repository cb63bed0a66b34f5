"""The norm at the start of a layer belongs to the body of the layer before it, with the residual addition."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import fx

from speccompile.graph.step_graph import StepGraph
from speccompile.passes.base import Changes, Facts, Pass, PassRegion, facts
from speccompile.passes.target.outline import AHEAD, NORMED, layer_input

aten = torch.ops.aten

#: Ops that a norm consists of; one of ``_REDUCTIONS`` is among them.
_REDUCTIONS = frozenset({aten.mean.dim, aten.layer_norm.default, aten.rms_norm.default, aten.native_layer_norm.default})
_NORM_OPS = _REDUCTIONS | {
    aten.to.dtype,
    aten._to_copy.default,
    aten.type_as.default,
    aten.pow.Tensor_Scalar,
    aten.square.default,
    aten.sub.Tensor,
    aten.add.Tensor,
    aten.mul.Tensor,
    aten.div.Tensor,
    aten.rsqrt.default,
    aten.sqrt.default,
}


@dataclass(frozen=True)
class MoveNorms(Pass):
    """Marks the norm that a layer begins with as a part of the layer before it: compiled as one body, the residual
    addition and the norm are one kernel. The first layer's becomes a part of what comes before the layers. The final
    norm stays outside of the layers, since steps compute it at fewer positions or of other hidden states."""

    name: ClassVar[str] = "move_norms"
    looks_for: ClassVar[str] = "norms at the start of layers"
    region: ClassVar[PassRegion] = "model"
    requires: ClassVar[Facts] = facts("linears_chosen")
    provides: ClassVar[Facts] = facts("norms_moved")
    # Layers may begin with something else.
    optional: ClassVar[bool] = True

    def run(self, graph: StepGraph) -> Changes:
        layers = graph.anchors.layers
        found = {index: _norm(graph, index) for index in range(len(layers))}
        # MTP modules are layers that all read the embedding.
        follows = all(layer_input(graph, index) is layers[index - 1] for index in range(1, len(layers)))
        if len(set(layers)) < 2 or not follows or not all(found.values()):
            return Changes(0, "layers stay whole")
        for index, nodes in found.items():
            inside = set(nodes)
            for node in nodes:
                if any(user not in inside for user in node.users):
                    node._rename(f"{NORMED}_{index}")
                if index == 0:
                    del node.meta["layer"]
                else:
                    node.meta |= {"layer": index - 1, AHEAD: True}
        return Changes(len(found), f"{len(found)} norms follow the addition before them")


def _norm(graph: StepGraph, index: int) -> list[fx.Node]:
    """The nodes of a layer that normalise its input; none where it does not begin so."""
    hidden = layer_input(graph, index)
    nodes = [node for node in graph.graph.nodes if node.meta.get("layer") == index]
    inside, of_weights = {hidden}, set[fx.Node]()
    for node in nodes:
        read = node.all_input_nodes
        if node.target in _NORM_OPS and all(x in inside or x in of_weights or _is_weight(graph, x) for x in read):
            (of_weights if inside.isdisjoint(read) else inside).add(node)
    # Gemma adds 1 to the weights of its norms, also of later ones.
    for node in reversed(nodes):
        if node in of_weights and inside.issuperset(node.users):
            inside.add(node)
    norm = [node for node in nodes if node in inside]
    outputs = [node for node in norm if any(user not in inside for user in node.users)]
    whole = all(node.meta["val"].shape == hidden.meta["val"].shape for node in outputs)
    return norm if whole and any(node.target in _REDUCTIONS for node in norm) else []


def _is_weight(graph: StepGraph, node: fx.Node) -> bool:
    return node.op == "placeholder" and graph.ports[node.name].role == "weight"

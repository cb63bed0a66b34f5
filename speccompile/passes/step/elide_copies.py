"""Copies of results that nothing reads afterwards.

A pass that changes a value in place copies it first, since it cannot know whether a later pass reads the value. At the
end of the pipeline it is known: the scores of a step are its logits, changed in place, unless the logits are recorded.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import fx

from speccompile.graph.step_graph import StepGraph
from speccompile.graph.verify import storages_of
from speccompile.passes.base import Changes, Facts, Pass, PassRegion, facts

aten = torch.ops.aten

_COPIES = frozenset({aten._to_copy.default, aten.clone.default})


@dataclass(frozen=True)
class ElideCopies(Pass):
    """Removes copies that keep dtype, device and strides, of a result that no other op reads later.

    State, weights and results that outputs read are copied as before.
    """

    name: ClassVar[str] = "elide_copies"
    looks_for: ClassVar[str] = "copies"
    region: ClassVar[PassRegion] = "model"
    provides: ClassVar[Facts] = facts("copies_elided")
    optional: ClassVar[bool] = True

    def run(self, graph: StepGraph) -> Changes:
        elided = []
        for copy in [node for node in graph.graph.nodes if node.target in _COPIES]:
            source = copy.all_input_nodes[0]
            if _is_same_kind(copy, source) and _is_last_reader(graph, copy, source):
                graph.replace(copy, source)
                elided.append(source.name)
        return Changes(len(elided), f"changed in place: {', '.join(elided)}" if elided else "every copy is needed")


def _is_same_kind(copy: fx.Node, source: fx.Node) -> bool:
    tensors = [node.meta["val"] for node in (copy, source)]
    made, given = [(tensor.dtype, tensor.device, tensor.shape, tensor.stride()) for tensor in tensors]
    return bool(made == given)


def _is_last_reader(graph: StepGraph, copy: fx.Node, source: fx.Node) -> bool:
    """Whether no node after ``copy`` reads memory of ``source``, which is a result of the step."""
    storages = storages_of(graph)
    own = storages[source]
    if any(node.op == "placeholder" for node in own):
        return False
    nodes = list(graph.graph.nodes)
    later = nodes[nodes.index(copy) + 1 :]
    return not any(own & storages[argument] for node in later for argument in node.all_input_nodes)

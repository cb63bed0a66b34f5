"""A drafter's executable: what passes have inserted before the target, without the target."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from speccompile.errors import PassError
from speccompile.graph.step_graph import Anchors, StepGraph, Values
from speccompile.passes.base import Changes, Facts, Pass, PassRegion, facts


@dataclass(frozen=True)
class DropTarget(Pass):
    """Removes the target: the ops before it remain."""

    name: ClassVar[str] = "drop_target"
    looks_for: ClassVar[str] = "the target's ops"
    region: ClassVar[PassRegion] = "draft"
    requires: ClassVar[Facts] = facts("outlined", "rows")
    provides: ClassVar[Facts] = facts("target_dropped")
    invalidates: ClassVar[Facts] = facts("outlined", "logits")

    def run(self, graph: StepGraph) -> Changes:
        nodes = list(graph.graph.nodes)
        dropped = nodes[nodes.index(graph.anchors.start) : -1]
        kept = [node for node in nodes[: -len(dropped) - 1] if node.op != "placeholder"]
        if not kept:
            raise PassError("the drafter has no op before the target: its passes must insert before the target's start")
        graph.set_outputs()
        last = kept[-1]
        graph.anchors = Anchors(last, last, last, [last], last, last)
        for node in reversed(dropped):
            graph.graph.erase_node(node)
        live = set(graph.graph.nodes)
        graph.values = Values((name, node) for name, node in graph.values.items() if node in live)
        graph.remove_dead_code()
        return Changes(len(dropped), f"{len(dropped)} ops of the target are gone")

"""Inputs of the target in a step of trees."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from speccompile.graph.step_graph import StepGraph
from speccompile.graph.tree import Tree
from speccompile.ops.draft_rows import form_of
from speccompile.ops.verify_tree import newest_and_nodes
from speccompile.passes.base import Changes, Facts, Pass, PassRegion, facts
from speccompile.passes.step.verify_inputs import feed_target
from speccompile.passes.target.tree_bodies import call_tree_bodies


@dataclass(frozen=True)
class TreeInputs(Pass):
    """The target reads the newest committed token and the nodes of ``tree``. The position of a node is the root's plus
    its depth; its KV belongs at the root's place plus its number. Names ``root`` ``[B]``, that place."""

    tree: Tree

    name: ClassVar[str] = "tree_inputs"
    named_values: ClassVar[tuple[str, ...]] = ("input_tokens", "positions", "root")
    looks_for: ClassVar[str] = "the inputs input_ids and position_ids"
    region: ClassVar[PassRegion] = "inputs"
    requires: ClassVar[Facts] = facts("outlined", "tree_bodies", "rows", "tree", "drafts", "drafts_limited")
    provides: ClassVar[Facts] = facts("target_inputs", "step_logits")

    def run(self, graph: StepGraph) -> Changes:
        width = self.tree + 1
        read, positions, places, root = graph.insert(
            form_of(newest_and_nodes, graph.facts),
            graph.state("tokens"),
            graph.state("length"),
            *[graph.values[name] for name in ("slots", "drafts", "depths")],
            before=graph.anchors.start,
            vocab_size=graph.layout.vocab_size,
        )
        feed_target(graph, read, positions, width)
        graph.name_value("root", root)
        count = call_tree_bodies(graph, places, graph.values["parents"])
        return Changes(count, f"the target reads {list(read.meta['val'].shape)}")

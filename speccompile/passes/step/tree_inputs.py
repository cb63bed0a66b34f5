"""Inputs of the target in a step of trees."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from speccompile.graph.step_graph import StepGraph
from speccompile.graph.tree import Tree
from speccompile.passes.base import Changes, Facts, Pass, PassRegion, facts
from speccompile.passes.step.verify_inputs import feed_target, newest_and_drafts
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
            newest_and_nodes,
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


def newest_and_nodes(
    tokens: torch.Tensor,
    length: torch.Tensor,
    slots: torch.Tensor,
    drafts: torch.Tensor,
    depths: torch.Tensor,
    *,
    vocab_size: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Tokens, positions and places of the KV ``[B, T]`` of a verify step, and the root's place ``[B]``.

    Args:
        tokens: ``[N, S]``; length: ``[N]``; slots: ``[B]``; drafts: ``[B, T - 1]``, -1 for none; depths: ``[B, T]``.
    """
    width = depths.shape[1]
    read, places = newest_and_drafts(tokens, length, slots, drafts, width=width, vocab_size=vocab_size)
    root = places[:, 0]
    return read, root[:, None] + depths, places, root

"""Drafting of trees with a head that reads its own output."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import fx

from speccompile.graph.step_graph import StepGraph
from speccompile.graph.tree import Tree
from speccompile.modes.network.draft_tree import NodeReader
from speccompile.modes.network.head_passes import newest_rows, outputs_of, target_ids_of
from speccompile.modes.network.passes import drafter_of
from speccompile.ops.draft_rows import form_of, side_by_side
from speccompile.ops.verify_tree import rows_on_path
from speccompile.passes.step.draft_tree import DraftTree, ReadNodes, TreeForward


@dataclass(frozen=True)
class DraftTreeByHead(DraftTree):
    """Draft a tree. The first level comes from the stored output of the newest row.

    The row of a node reads the node's token, and the head's own output in the parent's row. Its position is the one
    before the token's own.
    """

    name: ClassVar[str] = "draft_tree_by_head"
    looks_for: ClassVar[str] = "the mode's head"

    def forward(self, graph: StepGraph) -> TreeForward:
        return HeadForward(graph, self.tree, draws=self.draws)

    def max_len(self, graph: StepGraph) -> int:
        return drafter_of(graph).layout.max_len

    def token_ids(self, graph: StepGraph) -> fx.Node | None:
        return target_ids_of(graph, draws=self.draws)


class HeadForward:
    """Forwards of a head over the levels of a tree."""

    def __init__(self, graph: StepGraph, tree: Tree, *, draws: bool) -> None:
        self._graph, self._before = graph, graph.anchors.start
        self._reader = NodeReader(graph, tree, ahead=1)
        head = drafter_of(graph)
        self._outputs = outputs_of(head, draws=draws)
        # The input that is replaced: the head's projection of the target's hidden states, or these themselves.
        self._reads = "fused" if "fused" in head.values else "hidden_states"
        # The head's output in the rows of the newest level, ``[B, m, H]``, and the inputs of all rows so far, ``[B, n *
        # H]``.
        self._carried: fx.Node
        self._flat: list[fx.Node] = []

    def after_text(self) -> fx.Node:
        return self._logits_of(newest_rows(self._graph, self._graph.values["slots"], self._before))

    def after_nodes(self, nodes: ReadNodes) -> fx.Node:
        graph, before = self._graph, self._before
        function = form_of(rows_on_path, graph.facts)
        carried = graph.insert(function, self._carried, nodes.came_from, before=before)
        flat = [*self._flat, graph.insert(as_line, carried, before=before)]
        joined = flat[0] if len(flat) == 1 else graph.insert(form_of(side_by_side, graph.facts), *flat, before=before)
        self._flat = [joined]
        read = graph.insert(as_rows, joined, before=before, count=len(nodes.levels))
        return self._logits_of(self._reader.read(nodes, "hidden", {self._reads: read}))

    def _logits_of(self, hidden: fx.Node) -> fx.Node:
        logits, self._carried = self._reader.follows(hidden, "hidden", self._outputs)
        return logits


def as_line(rows: torch.Tensor) -> torch.Tensor:
    """``[B, n * H]`` of ``[B, n, H]``."""
    return rows.flatten(1)


def as_rows(line: torch.Tensor, *, count: int) -> torch.Tensor:
    """``[B, n, H]`` of ``[B, n * H]``, n = ``count``."""
    return line.unflatten(1, (count, -1))

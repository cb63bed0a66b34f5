"""An EAGLE-3 head drafts a tree.

The row of a draft token belongs to the position before the token's own; its KV lies after that of the text, in the
order in which nodes are read. Each level reads all nodes again: beside the weights they take little, and attention then
has the whole tree before it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import fx

from speccompile.graph.step_graph import StepGraph
from speccompile.modes.eagle3.passes import NEWEST, gather_rows, outputs_of, target_ids_of
from speccompile.modes.network.passes import drafter_of, forward_drafter
from speccompile.modes.network.tree_forms import PARENTS, PLACES, of_trees
from speccompile.passes.step.draft_tree import DraftTree, ReadNodes, expansions


@dataclass(frozen=True)
class DraftTreeByHead(DraftTree):
    """The first level comes from the stored output of the newest row. A node's row reads its token and the head's own
    output in its parent's row."""

    name: ClassVar[str] = "draft_tree_by_head"
    looks_for: ClassVar[str] = "the mode's head"

    def forward(self, graph: StepGraph) -> HeadForward:
        return HeadForward(graph, draws=self.draws, nodes=sum(level.count for level in expansions(self.tree)[1:]))

    def max_len(self, graph: StepGraph) -> int:
        return drafter_of(graph).layout.max_len

    def token_ids(self, graph: StepGraph) -> fx.Node | None:
        return target_ids_of(graph, draws=self.draws)


class HeadForward:
    """``nodes``: how many the last forward of the step reads."""

    def __init__(self, graph: StepGraph, *, draws: bool, nodes: int) -> None:
        self._graph, self._before, self._slots = graph, graph.anchors.start, graph.values["slots"]
        self._head = drafter_of(graph)
        self._tree_head = of_trees(self._head)
        self._outputs = outputs_of(self._head, draws=draws)
        most = self._head.layout.cache_len - max(nodes, 1)
        self._first = graph.insert(first_place, graph.state("length"), self._slots, before=self._before, most=most)
        # What the head left in the rows of the newest level, ``[B, m, H]``, and what all rows so far have read.
        self._carried: fx.Node
        self._read: list[fx.Node] = []

    def after_text(self) -> fx.Node:
        newest = self._graph.insert(gather_rows, self._graph.state(NEWEST), self._slots, before=self._before)
        return self._logits_of(newest)

    def after_nodes(self, nodes: ReadNodes) -> fx.Node:
        graph, before = self._graph, self._before
        carried = graph.insert(of_parents, self._carried, nodes.came_from, before=before)
        self._read = [graph.insert(with_rows, *self._read, carried, before=before)]
        positions, places = graph.insert(rows_of_nodes, self._first, before=before, levels=nodes.levels)
        # The head's projection of the target's hidden states, or these themselves.
        reads = "fused" if "fused" in self._head.values else "hidden_states"
        given = {reads: self._read[0], PLACES: places, PARENTS: nodes.parents}
        (hidden,) = forward_drafter(
            graph,
            nodes.tokens,
            positions,
            self._slots,
            before=before,
            outputs=("hidden",),
            given=given,
            drafter=self._tree_head,
        )
        return self._logits_of(graph.insert(last_rows, hidden, before=before, count=nodes.newest))

    def _logits_of(self, hidden: fx.Node) -> fx.Node:
        """Of what the layers left, ``[B, m, H]``."""
        # With that, of tokens and positions nothing is read but their number.
        any_tokens = self._graph.insert(some_tokens, hidden, before=self._before)
        logits, self._carried = forward_drafter(
            self._graph,
            any_tokens,
            any_tokens,
            self._slots,
            before=self._before,
            outputs=self._outputs,
            given={"hidden": hidden},
        )
        return logits


def first_place(length: torch.Tensor, slots: torch.Tensor, *, most: int) -> torch.Tensor:
    """The place ``[B]`` of the first node's KV, which is its row's position; at most ``most`` where no tree fits."""
    return (length[slots] - 1).clamp(min=0, max=most)


def rows_of_nodes(first: torch.Tensor, *, levels: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    """Positions and places ``[B, n]`` of nodes of these levels, from ``first`` ``[B]`` on."""
    depths = torch.cat([torch.full((1,), level - 1, device=first.device) for level in levels])
    return first[:, None] + depths, first[:, None] + torch.arange(len(levels), device=first.device)


def some_tokens(hidden: torch.Tensor) -> torch.Tensor:
    """int64 ``[B, m]`` for ``[B, m, H]``."""
    return hidden.new_zeros(hidden.shape[:2], dtype=torch.int64)


def of_parents(carried: torch.Tensor, came_from: torch.Tensor) -> torch.Tensor:
    """``[B, m, H]`` of ``[B, n, H]``, at the indices ``[B, m]``."""
    return carried.gather(1, came_from[..., None].expand(-1, -1, carried.shape[2]))


def with_rows(*rows: torch.Tensor) -> torch.Tensor:
    """``[B, n, H]`` side by side."""
    return torch.cat(rows, dim=1)


def last_rows(hidden: torch.Tensor, *, count: int) -> torch.Tensor:
    """``[B, count, H]`` of ``[B, n, H]``."""
    return hidden[:, -count:]

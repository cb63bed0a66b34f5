"""Draft tokens that are a tree: what the shape of the tier holds of a ready drafter's proposal."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

import speccompile.ops  # noqa: F401  defines the ops
from speccompile.graph.step_graph import StepGraph
from speccompile.graph.tree import PROPOSAL, Tree
from speccompile.passes.base import Changes, Facts, Pass, facts
from speccompile.passes.step.drafts import set_drafts


@dataclass(frozen=True)
class ReadTree(Pass):
    """Takes of each row's proposal the nodes that fit into ``tree``, at most as many as the request wants. Names
    ``drafts`` ``[B, nodes]``, ``parents`` and ``depths`` ``[B, 1 + nodes]``."""

    tree: Tree

    name: ClassVar[str] = "read_tree"
    looks_for: ClassVar[str] = "the proposals of a ready drafter"
    requires: ClassVar[Facts] = facts("rows")
    provides: ClassVar[Facts] = facts("drafts", "drafts_limited", "tree")

    def run(self, graph: StepGraph) -> Changes:
        tree = self.tree
        state = [graph.state(name) for name in (*PROPOSAL, "draft_limit")]
        drafts, parents, depths, lens = graph.insert(
            fitting_nodes,
            *state,
            graph.values["slots"],
            before=graph.anchors.start,
            nodes=int(tree),
            depth=tree.depth,
            branches=tree.branches,
            static=(tree.parents or (), tree.ranks or ()),
        )
        set_drafts(graph, drafts, lens)
        graph.name_value("parents", parents)
        graph.name_value("depths", depths)
        return Changes(1, str(tree))


def fitting_nodes(
    tokens: torch.Tensor,
    parents: torch.Tensor,
    count: torch.Tensor,
    draft_limit: torch.Tensor,
    slots: torch.Tensor,
    *,
    nodes: int,
    depth: int,
    branches: int,
    static: tuple[tuple[int, ...], tuple[int, ...]],
) -> tuple[torch.Tensor, ...]:
    """See :func:`speccompile.ops.tree.fit_tree`; state is ``[N, ...]``, and slots ``[B]``."""
    found: tuple[torch.Tensor, ...] = torch.ops.speccompile.fit_tree(
        tokens[slots], parents[slots], count[slots], draft_limit[slots], nodes, depth, branches, *map(list, static)
    )
    return found

"""Draft tokens that are a tree: what the shape of the tier holds of a ready drafter's proposal."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import fx

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
        slots, start = graph.values["slots"], graph.anchors.start
        set_tree(graph, *graph.insert(fitting_nodes, *state, slots, before=start, tree=tree))
        return Changes(1, str(tree))


def set_tree(graph: StepGraph, drafts: fx.Node, parents: fx.Node, depths: fx.Node, lens: fx.Node) -> None:
    """Make known a step's tree, as :func:`fit` returns it."""
    set_drafts(graph, drafts, lens)
    graph.name_value("parents", parents)
    graph.name_value("depths", depths)


def fitting_nodes(
    tokens: torch.Tensor,
    parents: torch.Tensor,
    count: torch.Tensor,
    draft_limit: torch.Tensor,
    slots: torch.Tensor,
    *,
    tree: Tree,
) -> tuple[torch.Tensor, ...]:
    """See :func:`fit`; state is ``[N, ...]``, and slots ``[B]``."""
    return fit(tree, tokens[slots], parents[slots], count[slots], draft_limit[slots])


def fit(
    tree: Tree, tokens: torch.Tensor, parents: torch.Tensor, count: torch.Tensor, limit: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """See :func:`speccompile.ops.tree.fit_tree`."""
    shape, static = (int(tree), tree.depth, tree.branches), (list(tree.parents or ()), list(tree.ranks or ()))
    found: tuple[torch.Tensor, ...] = torch.ops.speccompile.fit_tree(tokens, parents, count, limit, *shape, *static)
    return found

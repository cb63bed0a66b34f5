"""Draft tokens that are a tree: what the shape of the tier holds of a ready drafter's proposal."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import ClassVar

import torch
from torch import fx

import speccompile.ops  # noqa: F401  defines the ops
from speccompile.graph.step_graph import StepGraph
from speccompile.graph.tree import PROPOSAL, Tree
from speccompile.ops.draft_rows import form_of, rows_of
from speccompile.ops.numbers import numbers
from speccompile.passes.base import Changes, Facts, Pass, PassRegion, facts
from speccompile.passes.step.drafts import set_drafts
from speccompile.passes.step.tree_expansions import places_of_nodes


@dataclass(frozen=True)
class ReadTree(Pass):
    """Reads the nodes of each row's proposal that fit into ``tree``, up to the request's limit on drafts. Names
    ``drafts`` ``[B, nodes]``, ``parents`` and ``depths`` ``[B, 1 + nodes]``.
    """

    tree: Tree

    name: ClassVar[str] = "read_tree"
    named_values: ClassVar[tuple[str, ...]] = ("parents", "depths")
    looks_for: ClassVar[str] = "the proposals of a ready drafter"
    region: ClassVar[PassRegion] = "draft"
    requires: ClassVar[Facts] = facts("rows")
    provides: ClassVar[Facts] = facts("drafts", "drafts_limited", "tree")

    def run(self, graph: StepGraph) -> Changes:
        tree = self.tree
        slots, start, function = graph.values["slots"], graph.anchors.start, form_of(rows_of, graph.facts)
        state = [graph.state(name) for name in (*PROPOSAL, "draft_limit")]
        given = [graph.insert(function, tensor, slots, before=start) for tensor in state]
        set_tree(graph, *graph.insert(fitting, *given, before=start, tree=tree))
        return Changes(1, str(tree))


def set_tree(graph: StepGraph, drafts: fx.Node, parents: fx.Node, depths: fx.Node, lens: fx.Node) -> None:
    """Name a step's tree, in the form that :func:`fit` returns."""
    set_drafts(graph, drafts, lens)
    graph.name_value("parents", parents)
    graph.name_value("depths", depths)


def fitting(
    tokens: torch.Tensor, parents: torch.Tensor, count: torch.Tensor, limit: torch.Tensor, *, tree: Tree
) -> tuple[torch.Tensor, ...]:
    """:func:`fit`, as a pass inserts it."""
    return fit(tree, tokens, parents, count, limit)


def fit(
    tree: Tree, tokens: torch.Tensor, parents: torch.Tensor, count: torch.Tensor, limit: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """See :func:`speccompile.ops.tree.fit_tree`."""
    shape, static = (int(tree), tree.depth, tree.branches), (list(tree.parents or ()), list(tree.ranks or ()))
    found: tuple[torch.Tensor, ...] = torch.ops.speccompile.fit_tree(tokens, parents, count, limit, *shape, *static)
    return found


def static_form(
    tree: Tree, tokens: torch.Tensor, chances: torch.Tensor, limit: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """A static tree of all proposed ``tokens`` (-1: none) and their ``chances``, ``[B, n]``, in the form of
    :func:`speccompile.ops.tree.fit_tree`. Of more nodes than ``limit`` ``[B]`` the likeliest stay."""
    index = numbers(places_of_nodes(tree), tokens.device).expand(tokens.shape[0], -1)
    return kept_nodes(tree, tokens.gather(1, index), chances.gather(1, index), limit)


def kept_nodes(
    tree: Tree, drafts: torch.Tensor, chances: torch.Tensor, limit: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """A static tree of its nodes' ``drafts`` (-1: none) and their ``chances``, ``[B, nodes]``: see
    :func:`static_form`."""
    assert tree.parents is not None
    device, rows = drafts.device, drafts.shape[0]
    own = torch.where(drafts >= 0, chances, -inf)
    order = own.sort(dim=1, descending=True, stable=True).indices
    place = torch.zeros_like(order).scatter(1, order, torch.arange(int(tree), device=device).expand(order.shape))
    drafts = torch.where(place < limit[:, None], drafts, -1)
    depths = [len(path) for path in tree.paths]
    parents = numbers((-1, *tree.parents), device).expand(rows, -1).contiguous()
    return drafts, parents, numbers((0, *depths), device).expand(rows, -1).contiguous(), (drafts >= 0).sum(1)

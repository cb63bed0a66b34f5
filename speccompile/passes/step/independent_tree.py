"""Static trees of drafts that do not depend on one another: every token of a level may follow every token of the level
before, so each node of the tree has a draft.

A dynamic tree holds the likeliest combinations. These lack many nodes of a static tree.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from speccompile.errors import InvalidTiers
from speccompile.graph.state import N, StateSpec
from speccompile.graph.step_graph import StepGraph
from speccompile.graph.tree import Tree
from speccompile.ops.numbers import numbers
from speccompile.passes.base import Changes, Facts, Pass, PassRegion, facts
from speccompile.passes.step.drafts import useful_lens
from speccompile.passes.step.tree_drafts import fit, set_tree

#: State ``[N, levels * count]``: the likeliest tokens of each level, -1 for none.
CHOICES = "level_tokens"


def choice_state(levels: int, count: int) -> StateSpec:
    """The state in which the choices of all levels wait for the next step."""
    return StateSpec(CHOICES, (N, levels * count), torch.int64, fill=-1, low=0, high=2)


@dataclass(frozen=True)
class ReadIndependentTree(Pass):
    """Reads for each node of a static tree the choice of its level that its branch index names. If a request limits
    drafts to fewer than these, the nodes whose depth and branch indices have the smallest sums stay. Names the values
    that :class:`~speccompile.passes.step.tree_drafts.ReadTree` names.

    Args:
        count: choices of a level.
    """

    tree: Tree
    count: int

    name: ClassVar[str] = "read_independent_tree"
    looks_for: ClassVar[str] = "the choices of a ready drafter"
    region: ClassVar[PassRegion] = "draft"
    requires: ClassVar[Facts] = facts("rows")
    provides: ClassVar[Facts] = facts("drafts", "drafts_limited", "tree")

    def run(self, graph: StepGraph) -> Changes:
        if self.tree.branches > self.count:
            reason = f"it has the branch index {self.tree.branches - 1}, and the drafter chooses {self.count} tokens"
            raise InvalidTiers(tiers=(self.tree,), reason=f"{reason} of each level; use smaller indices")
        state = [graph.state(name) for name in (CHOICES, "draft_limit", "length", "limit")]
        slots, start = graph.values["slots"], graph.anchors.start
        options = {"tree": self.tree, "count": self.count}
        set_tree(graph, *graph.insert(chosen_nodes, *state, slots, before=start, **options))
        return Changes(1, str(self.tree))


def chosen_nodes(
    choices: torch.Tensor,
    draft_limit: torch.Tensor,
    length: torch.Tensor,
    limit: torch.Tensor,
    slots: torch.Tensor,
    *,
    tree: Tree,
    count: int,
) -> tuple[torch.Tensor, ...]:
    """The tree in the form of :func:`speccompile.ops.tree.fit_tree`; state is ``[N, ...]``, and slots ``[B]``. Nodes
    that could not be emitted any more are left out."""
    own, none = choices[slots], torch.zeros_like(slots)
    # Without a proposal the op returns only the form.
    _, parents, depths, _ = fit(tree, own, torch.zeros_like(own), none, none)
    paths = tree.paths
    places = numbers([(len(path) - 1) * count + path[-1] for path in paths], own.device)
    # No node comes before its parent in this order, which is the same for all rows.
    order = sorted(paths, key=lambda path: len(path) + sum(path))
    ranks = numbers([order.index(path) for path in paths], own.device)
    row_length = length[slots]
    deepest = useful_lens(torch.full_like(row_length, tree.depth), row_length, limit[slots])
    stays = (ranks < draft_limit[slots][:, None]) & (depths[:, 1:] <= deepest[:, None])
    drafts = torch.where(stays, own.gather(1, places.expand(own.shape[0], -1)), -1)
    return drafts, parents, depths, (drafts >= 0).sum(1)

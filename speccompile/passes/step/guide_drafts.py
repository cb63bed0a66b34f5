"""Guided decoding after a commit: the guide adds drafts of the next step that it forces, and removes those that it
forbids."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

import speccompile.sampling.guide_ops  # noqa: F401  defines the ops
from speccompile.graph.step_graph import StepGraph
from speccompile.graph.tree import PROPOSAL
from speccompile.passes.base import Changes, Facts, Pass, PassRegion, facts

_FOLLOWED = ("tokens", "length", "guide_number")


@dataclass(frozen=True)
class GuideDrafts(Pass):
    """Replaces the proposals of a ready drafter by the tokens that the guide forces, if it forces any. Truncates other
    proposals before the first token that the guide forbids. The next step is then no wider than necessary."""

    name: ClassVar[str] = "guide_drafts"
    looks_for: ClassVar[str] = "the proposals of a ready drafter"
    region: ClassVar[PassRegion] = "propose"
    requires: ClassVar[Facts] = facts("committed", "proposed")
    provides: ClassVar[Facts] = facts("drafts_guided")

    def run(self, graph: StepGraph) -> Changes:
        names = ("draft_lens", "draft_tokens", "limit", *_FOLLOWED)
        score = [graph.state(name) for name in ("draft_score",) if name in graph.layout.tensors]
        graph.insert(guide_drafts, graph.values["slots"], *[graph.state(name) for name in names], *score)
        return Changes(1)


@dataclass(frozen=True)
class TruncateTree(Pass):
    """Removes from a proposed tree the nodes that the guide forbids, and their descendants."""

    name: ClassVar[str] = "truncate_tree"
    looks_for: ClassVar[str] = "the tree that a ready drafter proposed"
    region: ClassVar[PassRegion] = "propose"
    requires: ClassVar[Facts] = facts("committed", "tree_proposed")
    provides: ClassVar[Facts] = facts("tree_truncated")

    def run(self, graph: StepGraph) -> Changes:
        state = [graph.state(name) for name in (*PROPOSAL, *_FOLLOWED)]
        graph.insert(truncate_tree, graph.values["slots"], *state)
        return Changes(1)


def guide_drafts(slots: torch.Tensor, *state: torch.Tensor) -> None:
    """Replace or end each row's drafts by its guide."""
    torch.ops.speccompile.guide_drafts_(*state[:2], slots, *state[2:])


def truncate_tree(slots: torch.Tensor, *state: torch.Tensor) -> None:
    """Remove the nodes of each row's tree that its guide does not allow."""
    torch.ops.speccompile.truncate_trees_(*state[:3], slots, *state[3:])

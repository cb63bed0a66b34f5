"""Trees under ``forced``: the given number of drafts is accepted on the deepest path, whose missing drafts are filled
in."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import fx

from speccompile.acceptance.kept_nodes import TreeKeep, longest_path, usable
from speccompile.acceptance.lossy import Criterion
from speccompile.graph.step_graph import StepGraph
from speccompile.graph.tree import Tree
from speccompile.passes.base import Changes, Facts, Pass, PassRegion, facts
from speccompile.passes.step.drafts import useful_lens
from speccompile.passes.step.tree_drafts import set_tree


@dataclass(frozen=True)
class TreeForcedAccept(TreeKeep):
    """Accept as many drafts of the deepest path as :attr:`criterion` keeps of a chain of that length."""

    criterion: Criterion = field(kw_only=True)
    state: tuple[str, ...] = ()

    name: ClassVar[str] = "tree_forced_accept"

    def path(
        self, graph: StepGraph, scores: fx.Node, target: fx.Node, text: fx.Node, length: fx.Node
    ) -> Sequence[fx.Node]:
        drafts, parents, depths, slots = (graph.values[name] for name in ("drafts", "parents", "depths", "slots"))
        own = [slots, *(graph.state(name) for name in self.state)] if self.state else []
        vocab = int(scores.meta["val"].shape[-1])
        given = (target, drafts, parents, depths)
        path, deepest, chain = graph.insert(deepest_path, *given, depth=self.tree.depth, vocab=vocab)
        kept = graph.insert(self.criterion, scores, chain, text, length, *own)
        found: Sequence[fx.Node] = graph.insert(first_of_path, path, deepest, kept)
        return found


@dataclass(frozen=True)
class TreeForcedAcceptSampled(TreeForcedAccept):
    """:class:`TreeForcedAccept` for tokens that are drawn, from the processed scores."""

    name: ClassVar[str] = "tree_forced_accept_sampled"
    requires: ClassVar[Facts] = facts("node_scores", "drafts", "tree")
    draws: ClassVar[bool] = True


@dataclass(frozen=True)
class FillTree(Pass):
    """Give every row a path as deep as the tree, or less near its token limit. Missing drafts are the row's newest
    token: those of all nodes of a static tree, and in a dynamic tree those of one path, which replaces a shallower
    tree."""

    tree: Tree

    name: ClassVar[str] = "fill_tree"
    looks_for: ClassVar[str] = "a tree of drafts"
    region: ClassVar[PassRegion] = "draft"
    requires: ClassVar[Facts] = facts("drafts", "tree", "rows")
    provides: ClassVar[Facts] = facts("full_drafts")

    def run(self, graph: StepGraph) -> Changes:
        state = [graph.state(name) for name in ("tokens", "length", "limit")]
        names = ("drafts", "parents", "depths")
        proposed = [graph.values[name] for name in names]
        for name in (*names, "row_draft_lens"):
            graph.values[name]._rename(f"proposed_{name}")
        nodes = (*state, graph.values["slots"], *proposed)
        fill = fill_static if self.tree.parents is not None else fill_path
        options = {} if self.tree.parents is not None else {"depth": self.tree.depth}
        set_tree(graph, *graph.insert(fill, *nodes, before=graph.anchors.start, **options))
        return Changes(1, f"{self.tree.depth} drafts on a path")


def deepest_path(
    target: torch.Tensor, drafts: torch.Tensor, parents: torch.Tensor, depths: torch.Tensor, *, depth: int, vocab: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The path to the deepest draft, the first in number: nodes ``[B, 1 + depth]``, the number of drafts ``[B]``, and
    these drafts ``[B, depth]``, -1 after the last."""
    nothing = torch.zeros_like(drafts, dtype=torch.float32)
    path, count = longest_path(usable(drafts, parents, target, vocab), parents, depths, nothing, depth=depth)
    places = torch.arange(depth, device=drafts.device)
    own = drafts.gather(1, (path[:, 1:] - 1).clamp(min=0))
    return path, count, torch.where(places < count[:, None], own, -1)


def first_of_path(path: torch.Tensor, deepest: torch.Tensor, kept: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """``path`` ``[B, 1 + depth]`` up to its first draft that is not ``kept``, bool ``[B, depth]``, and the number of
    drafts before it, at most ``deepest`` ``[B]``."""
    accepted = torch.minimum(kept.long().cumprod(1).sum(1), deepest)
    places = torch.arange(path.shape[1], device=path.device)
    last = path.gather(1, accepted[:, None])
    return torch.where(places <= accepted[:, None], path, last), accepted


def fill_static(
    tokens: torch.Tensor,
    length: torch.Tensor,
    limit: torch.Tensor,
    slots: torch.Tensor,
    drafts: torch.Tensor,
    parents: torch.Tensor,
    depths: torch.Tensor,
) -> tuple[torch.Tensor, ...]:
    """A static tree with a draft at each node that the row can still emit: drafts ``[B, nodes]``, parents and depths
    ``[B, 1 + nodes]``, and the number of drafts ``[B]``. State is ``[N, ...]``, slots ``[B]``."""
    newest, most = newest_and_most(tokens, length, limit, slots, drafts.shape[1])
    filled = torch.where(drafts < 0, newest, drafts)
    filled = torch.where(depths[:, 1:] <= most, filled, -1)
    return filled, parents.clone(), depths.clone(), (filled >= 0).sum(1)


def fill_path(
    tokens: torch.Tensor,
    length: torch.Tensor,
    limit: torch.Tensor,
    slots: torch.Tensor,
    drafts: torch.Tensor,
    parents: torch.Tensor,
    depths: torch.Tensor,
    *,
    depth: int,
) -> tuple[torch.Tensor, ...]:
    """A tree of one path of ``depth`` drafts in the rows whose tree is shallower; see :func:`fill_static`."""
    newest, most = newest_and_most(tokens, length, limit, slots, depth)
    all_tokens = torch.zeros_like(parents)
    _, count, chain = deepest_path(all_tokens, drafts, parents, depths, depth=depth, vocab=2**62)
    places = torch.arange(drafts.shape[1], device=drafts.device)
    path = torch.nn.functional.pad(chain, (0, drafts.shape[1] - depth), value=-1)
    path = torch.where(places < most, torch.where(path < 0, newest, path), -1)
    line = torch.where(places < depth, places, 0)
    shallow = count[:, None] < most
    found = torch.where(shallow, path, drafts)
    of = torch.cat([parents[:, :1], torch.where(shallow, line, parents[:, 1:])], 1)
    levels = torch.where(shallow, torch.where(places < depth, places + 1, 1), depths[:, 1:])
    return found, of, torch.cat([depths[:, :1], levels], 1), (found >= 0).sum(1)


def newest_and_most(
    tokens: torch.Tensor, length: torch.Tensor, limit: torch.Tensor, slots: torch.Tensor, depth: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The newest token and the number of drafts, at most ``depth``, that a step could emit, ``[B, 1]``."""
    row_length = length[slots]
    most = useful_lens(torch.full_like(row_length, depth), row_length, limit[slots])
    return tokens[slots, (row_length - 1).clamp(min=0)][:, None], most[:, None]

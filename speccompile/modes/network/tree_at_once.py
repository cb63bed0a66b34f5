"""Drafting of a tree from the logits of one forward, which do not depend on one another.

Every token of a level may follow every token of the level before, so the likeliest tree consists of the paths whose
product of probabilities is the greatest. Source: DDTree (2026, arXiv 2604.12989), whose trees come from the margins of
DFlash.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import ClassVar

import torch
from torch import fx

from speccompile.errors import InvalidTiers
from speccompile.graph.step_graph import StepGraph
from speccompile.graph.tree import Tree
from speccompile.modes.network.draft_at_once import DraftAtOnce, at_place
from speccompile.ops.draft_levels import as_target_ids
from speccompile.ops.draft_rows import form_of, newest_tokens
from speccompile.ops.numbers import numbers
from speccompile.passes.base import Changes, Facts, Pass, PassRegion, facts
from speccompile.passes.step.draft_chain import append_token, text_so_far
from speccompile.passes.step.draft_tree import likeliest_children
from speccompile.passes.step.hand_over import certain
from speccompile.passes.step.ranked_tree import of_independent
from speccompile.passes.step.sample import process
from speccompile.passes.step.tree_drafts import fit, kept_nodes, set_tree


@dataclass(frozen=True)
class DraftTreeAtOnce(Pass):
    """Draft a tree from the forward of ``chain``, whose draft length is the tree's depth. Names ``drafts`` ``[B,
    nodes]``, ``parents`` and ``depths`` ``[B, 1 + nodes]``.

    If tokens are drawn, the logits of a level go through the request's own pipeline after the likeliest tokens of the
    levels before, and the target's noise of the place is added. A rule that reads probabilities receives drafts of
    probability 1: one draw of a level is the child of all nodes of the level before.
    """

    tree: Tree
    chain: DraftAtOnce

    name: ClassVar[str] = "draft_tree_at_once"
    named_values: ClassVar[tuple[str, ...]] = ("parents", "depths")
    looks_for: ClassVar[str] = "the mode's network"
    region: ClassVar[PassRegion] = "draft"
    requires: ClassVar[Facts] = facts("outlined", "rows")
    provides: ClassVar[Facts] = facts("drafts", "drafts_limited", "tree")

    def run(self, graph: StepGraph) -> Changes:
        start, slots, tree = graph.anchors.start, graph.values["slots"], self.tree
        state = [graph.state(name) for name in ("tokens", "length", "limit")]
        sizes = {"draft_len": tree.depth, "max_len": self.chain.max_len(graph)}
        token, position, lens = graph.insert(form_of(newest_tokens, graph.facts), *state, slots, before=start, **sizes)
        logits = self.chain.logits(graph, token, position)
        if logits.meta["val"].shape[-1] < tree.branches:
            raise InvalidTiers(tiers=(tree,), reason="use at most as many branches as the drafter has tokens")
        ids = self.chain.token_ids(graph)
        levels = self._drawn(graph, logits) if self.chain.draws else self._likeliest(graph, logits, ids)
        nodes = (*levels, lens, graph.state("draft_limit"), slots)
        set_tree(graph, *graph.insert(tree_of, *nodes, before=start, tree=tree))
        if self.chain.probabilities:
            vocab = graph.layout.vocab_size
            probs = graph.insert(certain, graph.values["drafts"], before=start, vocab=vocab)
            graph.name_value("draft_probs", probs)
        return Changes(1, f"{tree}, {self.chain.what(graph)}")

    def _likeliest(self, graph: StepGraph, logits: fx.Node, ids: fx.Node | None) -> tuple[fx.Node, fx.Node]:
        """The likeliest tokens of each level and their log-probabilities, ``[B, depth, branches]``."""
        start, options = graph.anchors.start, {"count": self.tree.branches, "level": 0}
        tokens, logprobs = graph.insert(likeliest_children, logits, before=start, **options)
        if ids is not None:
            tokens = graph.insert(form_of(as_target_ids, graph.facts), tokens, ids, before=start)
        return tokens, logprobs

    def _drawn(self, graph: StepGraph, logits: fx.Node) -> tuple[fx.Node, fx.Node]:
        """:meth:`_likeliest`, by the request's own scores and noise."""
        start, slots = graph.anchors.start, graph.values["slots"]
        state = [graph.state(name) for name in ("tokens", "length")]
        noise = [graph.state(name) for name in ("temperature", "seed")]
        context, length = graph.insert(text_so_far, *state, slots, before=start)
        begun, levels = length, []
        for level in range(self.tree.depth):
            own = graph.insert(at_place, logits, before=start, place=level)
            scores = process(graph, own, context, length, start, drafted=level)
            options = {"count": self.tree.branches, "level": level}
            levels.append(graph.insert(likeliest_children, scores, begun, slots, *noise, before=start, **options))
            first = graph.insert(first_child, levels[-1][0], before=start)
            context, length = graph.insert(append_token, context, length, first, before=start)
        tokens, logprobs = (graph.insert(by_level, *part, before=start) for part in zip(*levels, strict=True))
        return tokens, logprobs


def first_child(tokens: torch.Tensor) -> torch.Tensor:
    """The likeliest token ``[B, 1]`` of ``[B, 1, count]``; token 0 if the drafter has no token there."""
    return tokens[..., 0].clamp(min=0)


def by_level(*levels: torch.Tensor) -> torch.Tensor:
    """``[B, depth, count]`` of a tensor ``[B, 1, count]`` for each level."""
    return torch.cat(levels, dim=1)


def tree_of(
    tokens: torch.Tensor,
    logprobs: torch.Tensor,
    lens: torch.Tensor,
    draft_limit: torch.Tensor,
    slots: torch.Tensor,
    *,
    tree: Tree,
) -> tuple[torch.Tensor, ...]:
    """The likeliest nodes in the form of :func:`speccompile.ops.tree.fit_tree`.

    Args:
        tokens: int64 ``[B, depth, count]``, the likeliest of each level first, -1 for none; logprobs: float32, of them.
        lens: int64 ``[B]``, the deepest level that a row drafts.
        draft_limit: state ``[N]``; slots: ``[B]``.
    """
    levels = torch.arange(tokens.shape[1], device=tokens.device)[None, :, None]
    offered = (levels < lens[:, None, None]) & (logprobs > -inf)
    tokens, logprobs = torch.where(offered, tokens, -1), torch.where(offered, logprobs, -inf)
    limit = draft_limit[slots]
    if tree.parents is None:
        return fit(tree, *of_independent(tokens, logprobs, int(tree)), limit)
    count, device, rows = tokens.shape[2], tokens.device, tokens.shape[0]
    places = numbers([(len(path) - 1) * count + path[-1] for path in tree.paths], device).expand(rows, -1)
    own = logprobs.flatten(1).gather(1, places)
    chances: list[torch.Tensor] = []
    for node, parent in enumerate(tree.parents):
        chances.append(own[:, node] if parent == 0 else chances[parent - 1] + own[:, node])
    return kept_nodes(tree, tokens.flatten(1).gather(1, places), torch.stack(chances, 1), limit)

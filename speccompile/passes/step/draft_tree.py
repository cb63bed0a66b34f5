"""Sequential drafting of a tree: level after level, each level in one forward.

After Li et al., "EAGLE-2: Faster Inference of Language Models with Dynamic Draft Trees" (2024), section 4: of each
level the tokens of the greatest cumulative probability are read next, and of all tokens the likeliest are the tree.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from math import inf
from typing import ClassVar, NamedTuple, Protocol

import torch
from torch import fx

import speccompile.ops  # noqa: F401  defines the ops
from speccompile.errors import InvalidTiers
from speccompile.graph.step_graph import StepGraph
from speccompile.graph.tree import Tree
from speccompile.ops.draft_levels import (
    as_target_ids,
    choose_nodes,
    likeliest_tree,
    next_level,
    with_nodes,
    within_reach,
)
from speccompile.ops.draft_rows import form_of, rows_of, side_by_side
from speccompile.ops.row_contexts import put_tokens
from speccompile.passes.base import Changes, Facts, Pass, PassRegion, facts
from speccompile.passes.step.draft_chain import text_so_far
from speccompile.passes.step.drawn_siblings import at_places, check_siblings, drafts_at, draw_siblings, own_places
from speccompile.passes.step.sample import process
from speccompile.passes.step.tree_drafts import fitting, set_tree, static_form
from speccompile.passes.step.tree_expansions import Expansion, expansions


class ReadNodes(NamedTuple):
    """Draft tokens that a forward reads, ``[B, n]``: those of all levels so far, the newest one last.

    Args:
        parents: ``[B, n]``, the index of each one's parent, -1 in the first level.
        levels: of each, from 1 on.
        newest: how many are of the newest level, m.
        newest_tokens: the tokens of the newest level, ``[B, m]``.
        came_from: ``[B, m]``, of each of these the index of its parent among the nodes of the level before.
    """

    tokens: fx.Node
    parents: fx.Node
    levels: tuple[int, ...]
    newest: int
    newest_tokens: fx.Node
    came_from: fx.Node


class Level(NamedTuple):
    """Tokens that are proposed for a level of a tree, ``[B, n]`` each.

    Args:
        tokens: -1 for none.
        ranks: the greatest are read next and stay; no child's is greater than its parent's.
        parents: see :func:`~speccompile.ops.draft_levels.next_level`.
        chances: cumulative log-probabilities, the ranks unless siblings are drawn without replacement.
    """

    tokens: fx.Node
    ranks: fx.Node
    parents: fx.Node
    chances: fx.Node


class TreeForward(Protocol):
    """Inserts a drafter's ops before ``graph.anchors.start``."""

    def after_text(self) -> fx.Node:
        """Logits ``[B, 1, V]`` of the token after the newest committed one."""

    def after_nodes(self, nodes: ReadNodes) -> fx.Node:
        """Logits ``[B, m, V]`` of the token after each node of the newest level."""


@dataclass(frozen=True)
class DraftTree(Pass):
    """Forwards before the target, whose tokens are a tree of drafts. A drafter is a subclass that defines
    :meth:`forward`. Names ``drafts`` ``[B, nodes]``, ``parents`` and ``depths`` ``[B, 1 + nodes]``.

    With ``draws`` logits go through the request's own pipeline, and the target's noise of the place is added: the
    likeliest child is the token that a chain would draw. With ``probabilities`` the children of a node are drawn
    without replacement, with separate noise (:mod:`~speccompile.passes.step.drawn_siblings`); ``draft_probs`` ``[B,
    nodes, V]`` then has for each node the distribution that it and its siblings were drawn from.
    """

    tree: Tree
    draws: bool = False
    probabilities: bool = False

    region: ClassVar[PassRegion] = "draft"
    requires: ClassVar[Facts] = facts("outlined", "rows")
    provides: ClassVar[Facts] = facts("drafts", "drafts_limited", "tree")

    @abstractmethod
    def forward(self, graph: StepGraph) -> TreeForward:
        """The drafter's forwards in this step."""

    @abstractmethod
    def max_len(self, graph: StepGraph) -> int:
        """The drafter's longest sequence. Rows whose drafts would exceed it have shorter paths, or none."""

    def token_ids(self, graph: StepGraph) -> fx.Node | None:
        """The target's ids ``[Vd]`` of the tokens that the logits belong to; None is all of them."""
        return None

    def run(self, graph: StepGraph) -> Changes:
        if self.probabilities:
            check_siblings(self.tree)
        start, levels = graph.anchors.start, expansions(self.tree)
        forward, ids = self.forward(graph), self.token_ids(graph)
        paths = _Paths(graph) if self.draws else None
        logits, nodes = forward.after_text(), None
        above: tuple[fx.Node, ...] = ()
        proposed: list[Level] = []
        drawn_from: list[fx.Node] = []
        sizes: list[int] = []
        for level, expansion in enumerate(levels):
            if level > 0:
                nodes, above = self._read(graph, nodes, proposed[-1], levels[level - 1], expansion)
                if paths is not None:
                    paths.follow(nodes)
                logits = forward.after_nodes(nodes)
            if logits.meta["val"].shape[-1] < expansion.branches:
                raise InvalidTiers(tiers=(self.tree,), reason="use at most as many branches as the drafter has tokens")
            given = (logits,) if paths is None else (paths.process(logits), *paths.noise)
            options = {"count": expansion.branches, "level": level}
            function = form_of(next_level, graph.facts)
            first = sum(sizes[:-1])
            if self.probabilities:
                tokens, logprobs, left, probs = graph.insert(draw_siblings, *given, before=start, **options)
                drawn_from.append(probs)
            else:
                tokens, logprobs = graph.insert(likeliest_children, *given, before=start, **options)
                if ids is not None:
                    tokens = graph.insert(form_of(as_target_ids, graph.facts), tokens, ids, before=start)
            flat, chances, parents = graph.insert(function, tokens, logprobs, *above, before=start, first=first)
            ranks = chances
            if self.probabilities:
                ranks = graph.insert(function, tokens, left, *above, before=start, first=first)[1]
            proposed.append(Level(flat, ranks, parents, chances))
            sizes.append(expansion.count * expansion.branches)
        self._fit(graph, proposed, sizes, drawn_from)
        read = sum(expansion.count for expansion in levels[1:])
        return Changes(len(levels), f"{len(levels)} levels, {read} nodes read, {sum(sizes)} tokens to choose from")

    def _read(
        self, graph: StepGraph, nodes: ReadNodes | None, level: Level, made_by: Expansion, expansion: Expansion
    ) -> tuple[ReadNodes, tuple[fx.Node, ...]]:
        """The tokens of a ``level`` that the next forward reads; and the cumulative log-probabilities of its newest
        nodes and their indices in the level.
        """
        before, count = graph.anchors.start, expansion.count
        options = {"count": count, "fixed": expansion.fixed, "branches": made_by.branches}
        function = form_of(choose_nodes, graph.facts)
        given = (level.tokens, level.ranks)
        tokens, chances, index, came_from = graph.insert(function, *given, before=before, **options)
        if self.probabilities:
            chances = graph.insert(at_places, level.chances, index, before=before)
        # The index of the first node of the level before among all.
        begin = -1 if nodes is None else len(nodes.levels) - nodes.newest
        read = () if nodes is None else (nodes.tokens, nodes.parents)
        function = form_of(with_nodes, graph.facts)
        all_tokens, parents = graph.insert(function, tokens, came_from, *read, before=before, begin=begin)
        levels = () if nodes is None else nodes.levels
        depth = levels[-1] + 1 if levels else 1
        found = ReadNodes(all_tokens, parents, (*levels, *[depth] * count), count, tokens, came_from)
        return found, (chances, index)

    def _fit(self, graph: StepGraph, proposed: list[Level], sizes: list[int], drawn_from: list[fx.Node]) -> None:
        start, slots, facts = graph.anchors.start, graph.values["slots"], graph.facts
        join = form_of(side_by_side, facts)
        parts = ([level.tokens for level in proposed], [level.ranks for level in proposed])
        tokens, ranks = (graph.insert(join, *part, before=start) for part in parts)
        parents = graph.insert(join, *[level.parents for level in proposed], before=start)
        # The indices of drawn tokens are fitted, and lead to their distributions.
        given = graph.insert(own_places, tokens, before=start) if self.probabilities else tokens
        state = [graph.state(name) for name in ("length", "limit")]
        depths = tuple(level for level, size in enumerate(sizes, 1) for _ in range(size))
        options = {"depths": depths, "max_len": self.max_len(graph)}
        limit = graph.insert(form_of(rows_of, facts), graph.state("draft_limit"), slots, before=start)
        if self.tree.parents is not None:
            nodes = (given, ranks, *state, slots, limit)
            fitted = graph.insert(fitting_static_tree, *nodes, before=start, tree=self.tree, **options)
        else:
            options["nodes"] = int(self.tree)
            nodes = (given, ranks, parents, *state, slots)
            found = graph.insert(form_of(likeliest_tree, facts), *nodes, before=start, **options)
            fitted = graph.insert(fitting, *found, limit, before=start, tree=self.tree)
        if self.probabilities:
            children = [level.branches for level in expansions(self.tree) for _ in range(level.count)]
            expanded = tuple(node for node, count in enumerate(children) for _ in range(count))
            drafts, probs = graph.insert(drafts_at, fitted[0], tokens, *drawn_from, before=start, expanded=expanded)
            graph.name_value("draft_probs", probs)
            fitted = (drafts, *fitted[1:])
        set_tree(graph, *fitted)


class _Paths:
    """The text of each node of the newest level, for the request's own pipeline, and what its noise follows from."""

    def __init__(self, graph: StepGraph) -> None:
        self._graph, self._before, self._level = graph, graph.anchors.start, 0
        self._slots = graph.values["slots"]
        state = [graph.state(name) for name in ("tokens", "length")]
        self._context, self._length = graph.insert(text_so_far, *state, self._slots, before=self._before)
        self._row_slots, self._row_length = self._slots, self._length

    @property
    def noise(self) -> list[fx.Node]:
        state = [self._graph.state(name) for name in ("temperature", "seed")]
        return [self._length, self._slots, *state]

    def follow(self, nodes: ReadNodes) -> None:
        """Each node of the newest level becomes its own row."""
        self._level += 1
        given = (self._context, self._length, self._slots, nodes.came_from, nodes.newest_tokens)
        found = self._graph.insert(rows_of_nodes, *given, before=self._before, level=self._level)
        self._context, self._row_length, self._row_slots = found

    def process(self, logits: fx.Node) -> fx.Node:
        """Scores ``[B, m, V]`` of logits ``[B, m, V]``."""
        graph, before = self._graph, self._before
        rows = graph.insert(as_rows, logits, before=before)
        text = (self._context, self._row_length)
        scores = process(graph, rows, *text, before, drafted=self._level, slots=self._row_slots)
        like: fx.Node = graph.insert(as_nodes, scores, logits, before=before)
        return like


def likeliest_children(
    logits: torch.Tensor,
    length: torch.Tensor | None = None,
    slots: torch.Tensor | None = None,
    temperature: torch.Tensor | None = None,
    seed: torch.Tensor | None = None,
    *,
    count: int,
    level: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The ``count`` likeliest tokens after each node of a level, and their log-probabilities, ``[B, m, count]`` of
    ``[B, m, V]``. Length and slots are ``[B]``, temperature and seed ``[N]``; without them, greedily."""
    if length is None or temperature is None or seed is None:
        tokens, logprobs = torch.ops.speccompile.likeliest(logits, count)
        return tokens, logprobs
    positions = (length + level)[:, None].expand(logits.shape[:2])
    tokens, logprobs = torch.ops.speccompile.likeliest(logits, count, temperature[slots], seed[slots], positions)
    return tokens, logprobs


def rows_of_nodes(
    context: torch.Tensor,
    length: torch.Tensor,
    slots: torch.Tensor,
    came_from: torch.Tensor,
    tokens: torch.Tensor,
    *,
    level: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Texts ``[B * m, S]``, their lengths and slots ``[B * m]``, of a level's nodes.

    Args:
        context: ``[B * n, S]``, of the nodes of the level before; length, slots: ``[B]``, of the rows; came_from,
            tokens: ``[B, m]``.
    """
    rows, count = tokens.shape
    before = context.unflatten(0, (rows, -1))
    texts = before.gather(1, came_from[..., None].expand(-1, -1, context.shape[1])).flatten(0, 1)
    row_length = length.repeat_interleave(count)
    texts = put_tokens(texts, row_length + (level - 1), tokens.reshape(-1, 1))
    return texts, row_length + level, slots.repeat_interleave(count)


def as_rows(logits: torch.Tensor) -> torch.Tensor:
    """``[B, m, V]`` as ``[B * m, 1, V]``."""
    return logits.flatten(0, 1)[:, None]


def as_nodes(scores: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    """Scores of all nodes, ``[B * m, 1, V]``, in the shape of ``logits``, ``[B, m, V]``."""
    return scores.reshape(logits.shape)


def fitting_static_tree(
    tokens: torch.Tensor,
    chances: torch.Tensor,
    length: torch.Tensor,
    limit: torch.Tensor,
    slots: torch.Tensor,
    draft_limit: torch.Tensor,
    *,
    depths: tuple[int, ...],
    max_len: int,
    tree: Tree,
) -> tuple[torch.Tensor, ...]:
    """See :func:`speccompile.passes.step.tree_drafts.static_form`. Tokens that a step could not emit are left out.

    Args:
        tokens, chances: ``[B, n]``, of all levels; length, limit: state ``[N]``; slots, draft_limit: ``[B]``.
        depths: of each token.
        max_len: the drafter's longest sequence.
    """
    inside = within_reach(length, limit, slots, depths, max_len)
    return static_form(tree, torch.where(inside & (chances > -inf), tokens, -1), chances, draft_limit)

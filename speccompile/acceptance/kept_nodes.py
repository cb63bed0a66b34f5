"""Trees judged by the lossy rules, which accept drafts that the target would not have chosen.

Cai et al., "Medusa" (2024), section 3.3.2; medusa/model/utils.py, ``evaluate_posterior``: of the paths whose drafts are
all accepted the longest is kept, and of equal ones that of the greatest likelihood.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from typing import ClassVar

import torch
from torch import fx

import speccompile.ops  # noqa: F401  defines the ops
from speccompile.graph.step_graph import StepGraph
from speccompile.graph.tree import Tree
from speccompile.ops.noise import TOKENS
from speccompile.passes.base import Changes, Facts, Pass, PassRegion, facts
from speccompile.passes.step.draft_chain import text_so_far
from speccompile.passes.step.draft_tree import as_rows, rows_of_nodes
from speccompile.passes.step.sample import filtered, process
from speccompile.passes.step.use_filters import uses_filters


@dataclass(frozen=True)
class ProcessNodes(Pass):
    """The logits of every node go through all processors, with the node's path as its sequence. Names ``node_scores``,
    float32 ``[B, T, V]``."""

    tree: Tree

    name: ClassVar[str] = "process_nodes"
    named_values: ClassVar[tuple[str, ...]] = ("node_scores",)
    looks_for: ClassVar[str] = "logits and a tree of drafts"
    region: ClassVar[PassRegion] = "choose"
    requires: ClassVar[Facts] = facts("step_logits", "drafts", "tree")
    provides: ClassVar[Facts] = facts("node_scores")

    def run(self, graph: StepGraph) -> Changes:
        values, before = graph.values, graph.output
        logits, slots = values["logits"], values["slots"]
        if uses_filters(graph):
            graph.name_value("node_scores", filtered(graph, logits, slots, before))
            return Changes(1, f"{int(self.tree)} nodes")
        context, start = graph.insert(text_so_far, graph.state("tokens"), graph.state("length"), slots)
        length, row_slots, above = start, slots, None
        levels: list[fx.Node] = []
        for level, count in enumerate(self.counts):
            nodes = graph.insert(nodes_of_level, values["depths"], level=level, count=count)
            if above is not None:
                family = graph.insert(parents_in, nodes, above, values["drafts"], values["parents"])
                context, length, row_slots = graph.insert(rows_of_nodes, context, start, slots, *family, level=level)
            rows = graph.insert(as_rows, graph.insert(logits_at, logits, nodes))
            # Processors on the host are called once for each token; a row that has some has no drafts.
            first = level == 0
            scores = process(graph, rows, context, length, before, level, calls_host=first, slots=row_slots)
            levels += [nodes, scores]
            above = nodes
        graph.name_value("node_scores", graph.insert(by_node, logits, *levels))
        return Changes(len(self.counts), f"{sum(self.counts)} rows")

    @property
    def counts(self) -> list[int]:
        """Nodes of each level, that of the root first; of a dynamic tree the most that there can be."""
        if self.tree.parents is not None:
            sizes = [len(path) for path in self.tree.paths]
            return [1, *(sizes.count(level) for level in range(1, self.tree.depth + 1))]
        levels = range(1, self.tree.depth + 1)
        return [1, *(min(self.tree.branches**level, int(self.tree) - level + 1) for level in levels)]


@dataclass(frozen=True)
class TreeKeep(Pass):
    """Accept the drafts of one path, which :meth:`path` chooses. The token after them is the one that ``exact``
    chooses.
    """

    tree: Tree

    named_values: ClassVar[tuple[str, ...]] = ("target_tokens", "row_accepted", "path")
    looks_for: ClassVar[str] = "scores and a tree of drafts"
    region: ClassVar[PassRegion] = "choose"
    requires: ClassVar[Facts] = facts("step_logits", "drafts", "tree")
    provides: ClassVar[Facts] = facts("accepted", "path", "path_scores")

    #: Tokens are drawn, from ``node_scores``; else they are the greatest of ``logits``.
    draws: ClassVar[bool] = False

    @abstractmethod
    def path(
        self, graph: StepGraph, scores: fx.Node, target: fx.Node, text: fx.Node, length: fx.Node
    ) -> Sequence[fx.Node]:
        """Insert ops that return the accepted path ``[B, 1 + depth]``, the last node again after its end, and the
        number of its drafts ``[B]``.

        Args:
            scores: ``[B, T, V]``, of all nodes; target: ``[B, T]``, the token that the target chooses after each.
            text: ``[B, S]``; length: ``[B]``.
        """

    def run(self, graph: StepGraph) -> Changes:
        values = graph.values
        text, length = graph.insert(text_so_far, graph.state("tokens"), graph.state("length"), values["slots"])
        if self.draws:
            scores = values["node_scores"]
            noise = (length, values["depths"], values["slots"], graph.state("temperature"), graph.state("seed"))
            target = graph.insert(draw_nodes, scores, *noise)
        else:
            scores = values["logits"]
            target = graph.insert(torch.ops.speccompile.choose, scores)
        path, accepted = self.path(graph, scores, target, text, length)
        graph.name_value("target_tokens", graph.insert(tokens_of, target, values["drafts"], path, accepted))
        graph.name_value("path", path)
        graph.name_value("row_accepted", accepted)
        for place in range((self.tree.depth + 1) * self.draws):
            graph.name_value(f"path_scores_{place}", graph.insert(scores_on_path, scores, path, place=place))
        return Changes(1, f"{int(self.tree)} nodes judged")


def nodes_of_level(depths: torch.Tensor, *, level: int, count: int) -> torch.Tensor:
    """The first ``count`` nodes of that depth, ``[B, count]``, of ``depths`` ``[B, T]``; -1 for none."""
    own = depths == level
    ranks = torch.arange(1, count + 1, device=depths.device)
    fits = own[:, None] & (own.long().cumsum(1)[:, None] == ranks[:, None])
    return torch.where(fits.any(-1), fits.long().argmax(-1), -1)


def parents_in(
    nodes: torch.Tensor, above: torch.Tensor, drafts: torch.Tensor, parents: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """For ``nodes`` ``[B, m]`` of a level the index of the parent in the level ``above`` ``[B, n]``, and the token; 0
    for none."""
    index = nodes.clamp(min=0)
    parent = parents.gather(1, index)
    tokens = torch.where(nodes > 0, drafts.gather(1, (index - 1).clamp(min=0)), 0)
    return (above[:, None] == parent[..., None]).long().argmax(-1), tokens.clamp(min=0)


def logits_at(logits: torch.Tensor, nodes: torch.Tensor) -> torch.Tensor:
    """``[B, m, V]`` of ``logits`` ``[B, T, V]``, those of the root where there is no node (-1)."""
    return logits[torch.arange(len(logits), device=logits.device)[:, None], nodes.clamp(min=0)]


def by_node(logits: torch.Tensor, *levels: torch.Tensor) -> torch.Tensor:
    """Scores ``[B, T, V]`` in the order of nodes.

    Args:
        levels: in turn the nodes of a level ``[B, m]`` and their scores ``[B * m, 1, V]``.
    """
    rows, width, vocab = logits.shape
    # One more place receives the scores of absent nodes.
    found = logits.new_empty((rows, width + 1, vocab), dtype=torch.float32)
    for nodes, scores in zip(levels[::2], levels[1::2], strict=True):
        places = torch.where(nodes < 0, width, nodes)
        found.scatter_(1, places[..., None].expand(-1, -1, vocab), scores.view(*nodes.shape, vocab))
    return found[:, :width].contiguous()


def draw_nodes(
    scores: torch.Tensor,
    length: torch.Tensor,
    depths: torch.Tensor,
    slots: torch.Tensor,
    temperature: torch.Tensor,
    seed: torch.Tensor,
) -> torch.Tensor:
    """The tokens ``[B, T]`` that the target draws after all nodes, by the noise of their positions.

    Args:
        scores: ``[B, T, V]``; length, slots: ``[B]``; depths: ``[B, T]``; temperature, seed: ``[N]``.
    """
    places = (temperature[slots], seed[slots], length[:, None] + depths)
    tokens: torch.Tensor = torch.ops.speccompile.choose(scores, *places, TOKENS, forbids=True)
    return tokens


def tokens_of(target: torch.Tensor, drafts: torch.Tensor, path: torch.Tensor, accepted: torch.Tensor) -> torch.Tensor:
    """The accepted drafts and the target's token after them, ``[B, 1 + depth]``; see :class:`TreeKeep`."""
    own = target.gather(1, path)
    kept = drafts.gather(1, (path[:, 1:] - 1).clamp(min=0))
    places = torch.arange(kept.shape[1], device=path.device)
    return torch.cat([torch.where(places < accepted[:, None], kept, own[:, :-1]), own[:, -1:]], 1)


def scores_on_path(scores: torch.Tensor, path: torch.Tensor, *, place: int) -> torch.Tensor:
    """``[B, 1, V]`` of ``scores`` ``[B, T, V]``, of the node at ``place`` on ``path``."""
    return logits_at(scores, path[:, place : place + 1])


def usable(drafts: torch.Tensor, parents: torch.Tensor, target: torch.Tensor, vocab: int) -> torch.Tensor:
    """Whether each node is a token after a node from which the target can choose one, bool ``[B, nodes]``."""
    return (drafts >= 0) & (drafts < vocab) & (target.gather(1, parents[:, 1:]) >= 0)


def longest_path(
    kept: torch.Tensor, parents: torch.Tensor, depths: torch.Tensor, likelihood: torch.Tensor, *, depth: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The longest path from the root whose nodes are all ``kept``, bool ``[B, nodes]``; of equally long ones that of
    the greatest likelihood, and then the first in number. Returns what :meth:`TreeKeep.path` does.

    Args:
        parents, depths: ``[B, 1 + nodes]``.
        likelihood: float ``[B, nodes]``, of each node after its parent.
    """
    of = parents[:, 1:]
    reached = torch.cat([torch.ones_like(kept[:, :1]), torch.zeros_like(kept)], 1)
    total = torch.zeros_like(likelihood[:, :1]).expand(parents.shape).contiguous()
    for _ in range(depth):
        reached = torch.cat([reached[:, :1], kept & reached.gather(1, of)], 1)
        total = torch.cat([total[:, :1], total.gather(1, of) + likelihood], 1)
    lengths = torch.where(reached, depths, -1)
    accepted = lengths.amax(1)
    best = torch.where(lengths == accepted[:, None], total, -inf)
    node = torch.where(best == best.amax(1, keepdim=True), 1, 0).argmax(1)
    path = []
    for place in range(depth, -1, -1):
        path.append(node)
        own = depths.gather(1, node[:, None])[:, 0]
        node = torch.where(own == place, parents.gather(1, node[:, None])[:, 0].clamp(min=0), node)
    return torch.stack(path[::-1], 1), accepted

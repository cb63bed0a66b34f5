"""Acceptance of trees by the rule ``exact``: from the root to the child that the target chooses itself."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import fx

import speccompile.ops  # noqa: F401  defines the ops
from speccompile.graph.step_graph import StepGraph
from speccompile.graph.tree import Tree
from speccompile.ops.draft_rows import form_of
from speccompile.ops.tree import child_of
from speccompile.ops.verify_tree import tokens_on_path
from speccompile.passes.base import Changes, Facts, Pass, PassRegion, facts
from speccompile.passes.step.draft_chain import append_token, text_so_far
from speccompile.passes.step.sample import draw, process


@dataclass(frozen=True)
class TreeGreedyAccept(Pass):
    """The rule ``exact`` on a tree, without noise. Names ``target_tokens`` ``[B, 1 + depth]`` and ``path``
    ``[B, 1 + depth]``, the target's tokens after the nodes on the accepted path and these nodes, and ``row_accepted``
    ``[B]``."""

    tree: Tree

    name: ClassVar[str] = "tree_greedy_accept"
    named_values: ClassVar[tuple[str, ...]] = ("target_tokens", "row_accepted", "path")
    looks_for: ClassVar[str] = "logits and a tree of drafts"
    region: ClassVar[PassRegion] = "choose"
    requires: ClassVar[Facts] = facts("step_logits", "drafts", "tree")
    provides: ClassVar[Facts] = facts("accepted", "path")

    def run(self, graph: StepGraph) -> Changes:
        names = ("logits", "drafts", "parents")
        name_path(graph, *graph.insert(greedy_path, *[graph.values[name] for name in names], depth=self.tree.depth))
        return Changes(1, f"{int(self.tree)} nodes judged")


def greedy_path(
    logits: torch.Tensor, drafts: torch.Tensor, parents: torch.Tensor, *, depth: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The target's tokens after all nodes ``[B, T]``, the accepted path ``[B, 1 + depth]``, and its drafts ``[B]``."""
    target = torch.ops.speccompile.choose(logits)
    path, accepted = torch.ops.speccompile.walk_tree(target, drafts, parents, depth)
    return target, path, accepted


def name_path(graph: StepGraph, target: fx.Node, path: fx.Node, accepted: fx.Node) -> None:
    """Name the accepted path ``[B, 1 + depth]``, the target's tokens after its nodes, and the number of its drafts.

    Args:
        target: ``[B, T]``, the target's tokens after all nodes; accepted: ``[B]``.
    """
    graph.name_value("target_tokens", graph.insert(form_of(tokens_on_path, graph.facts), target, path))
    graph.name_value("path", path)
    graph.name_value("row_accepted", accepted)


@dataclass(frozen=True)
class TreeExactAccept(Pass):
    """The rule ``exact`` on a tree, for tokens that are drawn. Noise depends only on the position, so all nodes of a
    depth share it. Only nodes on the path are judged: the request's processors change the logits of one node, with the
    path as its sequence, and the drawn token decides which node is next. Also names ``path_scores_0``,
    ``path_scores_1``, ..., the processed scores of each node on the path, float32 ``[B, 1, V]``.
    """

    tree: Tree

    name: ClassVar[str] = "tree_exact_accept"
    named_values: ClassVar[tuple[str, ...]] = ("target_tokens", "row_accepted", "path")
    looks_for: ClassVar[str] = "logits and a tree of drafts"
    region: ClassVar[PassRegion] = "choose"
    requires: ClassVar[Facts] = facts("step_logits", "drafts", "tree")
    provides: ClassVar[Facts] = facts("accepted", "path", "path_scores")

    def run(self, graph: StepGraph) -> Changes:
        before: fx.Node = graph.output
        slots, values = graph.values["slots"], graph.values
        state = [graph.state(name) for name in ("tokens", "length")]
        noise = [graph.state(name) for name in ("temperature", "seed")]
        context, length = graph.insert(text_so_far, *state, slots)
        now, walks, accepted = graph.insert(at_the_root, slots)
        tokens, path = [], [now]
        for depth in range(self.tree.depth + 1):
            logits = graph.insert(logits_of, values["logits"], now)
            # Processors on the host are called once for each token; a row that has some has no drafts.
            scores = process(graph, logits, context, length, before, drafted=depth, calls_host=depth == 0)
            graph.name_value(f"path_scores_{depth}", scores)
            token = graph.insert(draw, scores, length, slots, *noise)
            tokens.append(token)
            if depth == self.tree.depth:
                break
            step = (values["drafts"], values["parents"], now, token, walks, accepted)
            now, walks, accepted = graph.insert(next_node, *step)
            path.append(now)
            context, length = graph.insert(append_token, context, length, token)
        graph.name_value("target_tokens", graph.insert(as_columns, *tokens))
        graph.name_value("path", graph.insert(as_columns, *path))
        graph.name_value("row_accepted", accepted)
        return Changes(1, f"a path of up to {self.tree.depth} drafts judged")


@dataclass(frozen=True)
class JoinScores(Pass):
    """Names ``scores`` ``[B, 1 + depth, V]``, those of the nodes on the accepted path."""

    tree: Tree

    name: ClassVar[str] = "join_scores"
    named_values: ClassVar[tuple[str, ...]] = ("scores",)
    looks_for: ClassVar[str] = "the scores of the nodes on an accepted path"
    region: ClassVar[PassRegion] = "choose"
    requires: ClassVar[Facts] = facts("path_scores")
    provides: ClassVar[Facts] = facts("scores")

    def run(self, graph: StepGraph) -> Changes:
        nodes = [graph.values[f"path_scores_{depth}"] for depth in range(self.tree.depth + 1)]
        graph.name_value("scores", graph.insert(side_by_side, *nodes))
        return Changes(1)


def at_the_root(slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The root ``[B]``, True ``[B]``, and no accepted drafts ``[B]``."""
    return torch.zeros_like(slots), torch.ones_like(slots, dtype=torch.bool), torch.zeros_like(slots)


def logits_of(logits: torch.Tensor, now: torch.Tensor) -> torch.Tensor:
    """Logits of the nodes ``now`` ``[B]``, ``[B, 1, V]`` of ``[B, T, V]``."""
    return logits[torch.arange(logits.shape[0], device=logits.device), now][:, None]


def next_node(
    drafts: torch.Tensor,
    parents: torch.Tensor,
    now: torch.Tensor,
    token: torch.Tensor,
    walks: torch.Tensor,
    accepted: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The child of ``now`` ``[B]`` that is ``token`` ``[B, 1]``, whether there is one, and the accepted drafts."""
    now, walks = child_of(drafts, parents, now, token[:, 0], walks)
    return now, walks, accepted + walks


def side_by_side(*scores: torch.Tensor) -> torch.Tensor:
    """``[B, n, V]`` of n tensors ``[B, 1, V]``."""
    return torch.cat(scores, dim=1)


def as_columns(*columns: torch.Tensor) -> torch.Tensor:
    """``[B, n]`` of n tensors ``[B]`` or ``[B, 1]``."""
    return torch.stack([column.flatten() for column in columns], dim=1)

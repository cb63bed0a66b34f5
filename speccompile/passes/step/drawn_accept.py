"""Acceptance of tokens that are drawn with a temperature alone: no processor reads the logits before the choice."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

import speccompile.ops  # noqa: F401  defines the ops
from speccompile.graph.step_graph import StepGraph
from speccompile.graph.tree import Tree
from speccompile.ops.noise import TOKENS
from speccompile.passes.base import Changes, Facts, Pass, facts
from speccompile.passes.step.greedy_accept import count_agreeing, name_judged


@dataclass(frozen=True)
class DrawnAccept(Pass):
    """As :class:`~speccompile.passes.step.sample.ExactAccept`, over logits that only the temperature changes."""

    name: ClassVar[str] = "drawn_accept"
    looks_for: ClassVar[str] = "logits and drafts"
    requires: ClassVar[Facts] = facts("step_logits", "drafts")
    provides: ClassVar[Facts] = facts("accepted", "agreement")

    def run(self, graph: StepGraph) -> Changes:
        names = ("logits", "drafts", "row_draft_lens", "slots")
        state = [graph.state(name) for name in ("length", "temperature", "seed")]
        target_tokens, accepted = graph.insert(drawn_accept, *(graph.values[name] for name in names), *state)
        return name_judged(graph, target_tokens, accepted)


@dataclass(frozen=True)
class TreeDrawnAccept(Pass):
    """As :class:`~speccompile.passes.step.tree_accept.TreeExactAccept`, over logits that only the temperature changes:
    all nodes choose at once, those of one depth by the same noise."""

    tree: Tree

    name: ClassVar[str] = "tree_drawn_accept"
    looks_for: ClassVar[str] = "logits and a tree of drafts"
    requires: ClassVar[Facts] = facts("step_logits", "drafts", "tree")
    provides: ClassVar[Facts] = facts("accepted", "path")

    def run(self, graph: StepGraph) -> Changes:
        names = ("logits", "drafts", "parents", "depths", "slots")
        state = [graph.state(name) for name in ("length", "temperature", "seed")]
        nodes = [graph.values[name] for name in names]
        found = graph.insert(drawn_path, *nodes, *state, depth=self.tree.depth)
        for name, node in zip(("target_tokens", "path", "row_accepted"), found, strict=True):
            graph.name_value(name, node)
        return Changes(1, f"{int(self.tree)} nodes judged")


def drawn_accept(
    logits: torch.Tensor,
    drafts: torch.Tensor,
    draft_lens: torch.Tensor,
    slots: torch.Tensor,
    length: torch.Tensor,
    temperature: torch.Tensor,
    seed: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Target tokens ``[B, K+1]``, -1 where none can be chosen, and accepted draft tokens ``[B]``.

    Args:
        logits: ``[B, T, V]`` with T > K; drafts: ``[B, K]``; draft_lens, slots: ``[B]``.
        length, temperature, seed: ``[N]``.
    """
    count = drafts.shape[1] + 1
    positions = length[slots][:, None] + torch.arange(count, device=drafts.device)
    target = drawn(logits[:, :count], positions, temperature[slots], seed[slots])
    return target, count_agreeing(target, drafts, draft_lens)


def drawn_path(
    logits: torch.Tensor,
    drafts: torch.Tensor,
    parents: torch.Tensor,
    depths: torch.Tensor,
    slots: torch.Tensor,
    length: torch.Tensor,
    temperature: torch.Tensor,
    seed: torch.Tensor,
    *,
    depth: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    target = drawn(logits, length[slots][:, None] + depths, temperature[slots], seed[slots])
    path, accepted = torch.ops.speccompile.walk_tree(target, drafts, parents, depth)
    return target.gather(1, path), path, accepted


def drawn(logits: torch.Tensor, positions: torch.Tensor, temperature: torch.Tensor, seed: torch.Tensor) -> torch.Tensor:
    """Tokens ``[B, T]`` of ``logits`` ``[B, T, V]``, as :func:`speccompile.passes.step.sample.draw` chooses them after
    the processor of the temperature.

    Args:
        positions: int64 ``[B, T]``, of the tokens to be chosen; temperature, seed: ``[B]``.
    """
    scores = logits.float() / torch.where(temperature == 0, 1.0, temperature)[:, None, None]
    tokens: torch.Tensor = torch.ops.speccompile.choose(scores, temperature, seed, positions, TOKENS, forbids=True)
    return tokens

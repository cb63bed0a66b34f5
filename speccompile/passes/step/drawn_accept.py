"""Acceptance of tokens that are drawn from logits by few options: a temperature, and where steps use filters top-k,
top-p and min-p."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import fx

import speccompile.ops  # noqa: F401  defines the ops
from speccompile.graph.step_graph import StepGraph
from speccompile.graph.tree import Tree
from speccompile.ops.noise import TOKENS
from speccompile.passes.base import Changes, Facts, Pass, PassRegion, facts
from speccompile.passes.step.greedy_accept import count_agreeing, name_judged
from speccompile.passes.step.tree_accept import name_path
from speccompile.passes.step.use_filters import filter_state, uses_filters
from speccompile.utils.devices import traits_of


@dataclass(frozen=True)
class DrawnAccept(Pass):
    """The rule of :class:`~speccompile.passes.step.sample.ExactAccept` over logits that only these options change."""

    name: ClassVar[str] = "drawn_accept"
    named_values: ClassVar[tuple[str, ...]] = ("target_tokens", "row_accepted")
    looks_for: ClassVar[str] = "logits and drafts"
    region: ClassVar[PassRegion] = "choose"
    requires: ClassVar[Facts] = facts("step_logits", "drafts")
    provides: ClassVar[Facts] = facts("accepted", "agreement")

    def run(self, graph: StepGraph) -> Changes:
        names = ("logits", "drafts", "row_draft_lens", "slots")
        nodes = [graph.values[name] for name in names]
        target_tokens, accepted = graph.insert(drawn_accept, *nodes, *noise_state(graph), *own_filters(graph))
        return name_judged(graph, target_tokens, accepted)


@dataclass(frozen=True)
class TreeDrawnAccept(Pass):
    """The rule of :class:`~speccompile.passes.step.tree_accept.TreeExactAccept` over logits that only these options
    change: all nodes choose at once, those of one depth by the same noise.
    """

    tree: Tree

    name: ClassVar[str] = "tree_drawn_accept"
    named_values: ClassVar[tuple[str, ...]] = ("target_tokens", "row_accepted", "path")
    looks_for: ClassVar[str] = "logits and a tree of drafts"
    region: ClassVar[PassRegion] = "choose"
    requires: ClassVar[Facts] = facts("step_logits", "drafts", "tree")
    provides: ClassVar[Facts] = facts("accepted", "path")

    def run(self, graph: StepGraph) -> Changes:
        names = ("logits", "drafts", "parents", "depths", "slots")
        nodes = [*(graph.values[name] for name in names), *noise_state(graph), *own_filters(graph)]
        name_path(graph, *graph.insert(drawn_path, *nodes, depth=self.tree.depth))
        return Changes(1, f"{int(self.tree)} nodes judged")


def noise_state(graph: StepGraph) -> list[fx.Node]:
    """The state that a choice by temperature and noise reads."""
    return [graph.state(name) for name in ("length", "temperature", "seed")]


def own_filters(graph: StepGraph) -> list[fx.Node]:
    """The state of top-k, top-p and min-p; empty for steps with only a temperature."""
    return filter_state(graph)[1:] if uses_filters(graph) else []


def drawn_accept(
    logits: torch.Tensor,
    drafts: torch.Tensor,
    draft_lens: torch.Tensor,
    slots: torch.Tensor,
    length: torch.Tensor,
    temperature: torch.Tensor,
    seed: torch.Tensor,
    *filters: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Target tokens ``[B, K+1]``, -1 where none can be chosen, and accepted draft tokens ``[B]``.

    Args:
        logits: ``[B, T, V]`` with T > K; drafts: ``[B, K]``; draft_lens, slots: ``[B]``.
        length, temperature, seed: ``[N]``.
        filters: top_k, top_p and min_p ``[N]``, or none.
    """
    target = drawn(logits[:, : drafts.shape[1] + 1], slots, length, temperature, seed, filters)
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
    *filters: torch.Tensor,
    depth: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Results of :func:`~speccompile.passes.step.tree_accept.greedy_path`, with tokens that are drawn."""
    target = drawn(logits, slots, length, temperature, seed, filters, depths)
    path, accepted = torch.ops.speccompile.walk_tree(target, drafts, parents, depth)
    return target, path, accepted


def drawn(
    logits: torch.Tensor,
    slots: torch.Tensor,
    length: torch.Tensor,
    temperature: torch.Tensor,
    seed: torch.Tensor,
    filters: Sequence[torch.Tensor],
    depths: torch.Tensor | None = None,
) -> torch.Tensor:
    """Tokens ``[B, T]`` of ``logits`` ``[B, T, V]``, as :func:`speccompile.passes.step.sample.draw` chooses them after
    the processors of temperature and ``filters``.

    Args:
        slots: ``[B]``; length, temperature, seed: ``[N]``.
        filters: top_k, top_p and min_p ``[N]``, or none.
        depths: ``[B, T]``, the distance of each position from the end of the sequence; None is 0 .. T-1.
    """
    if filters or traits_of(logits.device).host_memory:
        options = filters or (None, None, None)
        tokens: torch.Tensor = torch.ops.speccompile.draw_filtered(
            logits, slots, temperature, *options, length, seed, depths
        )
        return tokens
    # On a GPU the division is compiled into other kernels.
    scores, own, positions = divided(logits, slots, temperature, length, depths)
    tokens = torch.ops.speccompile.choose(scores, own, seed[slots], positions, TOKENS, forbids=True)
    return tokens


def divided(
    logits: torch.Tensor,
    slots: torch.Tensor,
    temperature: torch.Tensor,
    length: torch.Tensor,
    depths: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Scores ``[B, T, V]``, which are ``logits`` divided by the temperature, the rows' temperatures ``[B]``, and the
    positions ``[B, T]`` of the tokens to be drawn. Arguments: see :func:`drawn`."""
    after = torch.arange(logits.shape[1], device=logits.device) if depths is None else depths
    own = temperature[slots]
    scores = logits.float() / torch.where(own == 0, 1.0, own)[:, None, None]
    return scores, own, length[slots][:, None] + after

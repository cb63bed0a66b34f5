"""Greedy acceptance: a draft token stays while it is the target's own choice."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import fx

import speccompile.ops.choose  # noqa: F401  defines the op
from speccompile.graph.step_graph import StepGraph
from speccompile.passes.base import Changes, Facts, Pass, PassRegion, facts


@dataclass(frozen=True)
class GreedyAccept(Pass):
    """The rule ``exact`` without noise: y_i = argmax(logits_i), accept while draft_i == y_i.

    Leaves ``target_tokens`` ``[B, K+1]`` and ``row_accepted`` ``[B]``, the accepted draft tokens a.
    """

    name: ClassVar[str] = "greedy_accept"
    named_values: ClassVar[tuple[str, ...]] = ("target_tokens", "row_accepted")
    looks_for: ClassVar[str] = "logits and drafts"
    region: ClassVar[PassRegion] = "choose"
    requires: ClassVar[Facts] = facts("step_logits", "drafts")
    provides: ClassVar[Facts] = facts("accepted", "agreement")

    def run(self, graph: StepGraph) -> Changes:
        names = ("logits", "drafts", "row_draft_lens")
        target_tokens, accepted = graph.insert(greedy_accept, *[graph.values[name] for name in names])
        return name_judged(graph, target_tokens, accepted)


def drafts_of(graph: StepGraph) -> int:
    """K of a step, from its drafts."""
    return int(graph.values["drafts"].meta["val"].shape[1])


def name_judged(graph: StepGraph, target_tokens: fx.Node, accepted: fx.Node) -> Changes:
    """Name the results of a rule over drafts: ``target_tokens`` ``[B, K+1]`` and ``row_accepted`` ``[B]``."""
    graph.name_value("target_tokens", target_tokens)
    graph.name_value("row_accepted", accepted)
    return Changes(1, f"{drafts_of(graph)} draft tokens judged")


def greedy_accept(
    logits: torch.Tensor, drafts: torch.Tensor, draft_lens: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Target tokens ``[B, K+1]``, -1 where logits are NaN and none can be chosen, and accepted draft tokens ``[B]``.

    Args:
        logits: ``[B, T, V]`` with T > K; drafts: ``[B, K]``; draft_lens: ``[B]``.
    """
    target = torch.ops.speccompile.choose(logits[:, : drafts.shape[1] + 1])
    return target, count_agreeing(target, drafts, draft_lens)


def count_agreeing(target: torch.Tensor, drafts: torch.Tensor, draft_lens: torch.Tensor) -> torch.Tensor:
    """Number of first ``drafts [B, K]`` that equal ``target [B, K+1]``: int64 ``[B]``, at most ``draft_lens``."""
    count = drafts.shape[1]
    offered = torch.arange(count, device=drafts.device) < draft_lens[:, None]
    agrees = (drafts == target[:, :count]) & offered
    return agrees.long().cumprod(1).sum(1)

"""Acceptance rules as functions of scores, drafts and seeds: the very ops that a step runs, without a model."""

from __future__ import annotations

from collections.abc import Callable

import torch

from speccompile.acceptance import Block, Rejection
from speccompile.acceptance.coins import decide
from speccompile.passes.greedy_accept import greedy_accept
from speccompile.passes.sample import noise

Judge = Callable[..., tuple[torch.Tensor, torch.Tensor]]


def exact(
    scores: torch.Tensor,
    drafts: torch.Tensor,
    lens: torch.Tensor,
    length: torch.Tensor,
    temperature: torch.Tensor,
    seed: torch.Tensor,
    draft_probs: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    scores = scores.clone()
    noise(scores, length, torch.arange(len(length)), temperature, seed)
    return greedy_accept(scores, drafts, lens, forbids=True)


def by_coins(judge: Judge) -> Judge:
    def run(
        scores: torch.Tensor,
        drafts: torch.Tensor,
        lens: torch.Tensor,
        length: torch.Tensor,
        temperature: torch.Tensor,
        seed: torch.Tensor,
        draft_probs: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        slots = torch.arange(len(length))
        return decide(scores, drafts, lens, slots, length, temperature, seed, draft_probs, judge=judge)

    return run


#: The lossless ones.
RULES: dict[str, Judge] = {"exact": exact, "rejection": by_coins(Rejection.judge), "block": by_coins(Block.judge)}

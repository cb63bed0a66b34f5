"""Acceptance rules as functions of scores, drafts and seeds: the very ops that a step runs, without a model."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from speccompile.acceptance import Block, Forced, Rejection
from speccompile.acceptance.coins import decide
from speccompile.acceptance.forced import forced_count
from speccompile.acceptance.lossy import Criterion, accept_tolerated
from speccompile.acceptance.relaxed import within_top
from speccompile.acceptance.typical import likely_enough
from speccompile.passes.step.sample import draw, exact_accept

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
    return exact_accept(scores, drafts, lens, torch.arange(len(length)), length, temperature, seed)


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


def by_criterion(criterion: Criterion) -> Judge:
    def run(
        scores: torch.Tensor,
        drafts: torch.Tensor,
        lens: torch.Tensor,
        length: torch.Tensor,
        temperature: torch.Tensor,
        seed: torch.Tensor,
        draft_probs: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        text = torch.zeros(len(length), 1, dtype=torch.int64)
        kept = criterion(scores, drafts, text, torch.ones_like(length))
        target = draw(scores, length, torch.arange(len(length)), temperature, seed)
        return accept_tolerated(target, drafts, lens, kept, vocab=scores.shape[-1])

    return run


#: The lossy ones, which keep what is likely enough; ``relaxed`` in its thinking phase (token 0 begins it).
LOSSY: dict[str, Judge] = {
    "typical": by_criterion(partial(likely_enough, threshold=0.3, alpha=0.09)),
    "relaxed": by_criterion(partial(within_top, begin=0, end=1, top_k=10, delta=0.6)),
}

#: What it keeps need not even be possible.
FORCED: Judge = by_criterion(partial(forced_count, rule=Forced(1.5)))

"""``rejection``: speculative sampling, token by token.

Leviathan et al., "Fast Inference from Transformers via Speculative Decoding" (2023), algorithm 1; Chen et al.,
"Accelerating Large Language Model Decoding with Speculative Sampling" (2023).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F

from speccompile.acceptance.coins import CoinRule, offered_mass
from speccompile.acceptance.multi_round import TreeCoinAccept
from speccompile.graph.step_form import StepForm
from speccompile.passes.base import Pass
from speccompile.passes.step.tree_accept import TreeGreedyAccept


@dataclass(frozen=True)
class Rejection(CoinRule):
    """Accept x_i with probability min(1, p_i(x_i) / q_i(x_i)); at the first rejection draw from max(p - q, 0).

    For a drafter without probabilities, q is 1 at its draft. This is lossless for any draft. The emitted tokens depend
    on the drafts; their distribution does not. Greedy requests are decided by ``exact``.

    On a tree the children of a node are judged in turn: see
    :class:`~speccompile.acceptance.multi_round.TreeCoinAccept`.
    """

    name: ClassVar[str] = "rejection"
    judges_trees: ClassVar[bool] = True

    def passes(self, form: StepForm) -> list[Pass]:
        if form.tree is None:
            return super().passes(form)
        return [TreeGreedyAccept(form.tree) if form.kind == "greedy" else TreeCoinAccept(form.tree)]

    @staticmethod
    def judge(
        probs: torch.Tensor,
        drafts: torch.Tensor,
        draft_lens: torch.Tensor,
        draft_probs: torch.Tensor | None,
        coins: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        offered, ids, mass = offered_mass(probs, drafts, draft_lens, draft_probs)
        # Strictly less: a draft with p = 0 is never accepted.
        passes = coins * mass.gather(-1, ids)[..., 0] < probs[:, : drafts.shape[1]].gather(-1, ids)[..., 0]
        accepted = (passes & offered).long().cumprod(1).sum(1)
        # After a row's last draft q is 0: the residual is p.
        left = (probs - F.pad(mass, (0, 0, 0, 1))).clamp(min=0)
        # If p and q are equal up to rounding, nothing is left. Drawing from p is then equivalent.
        return accepted, torch.where(left.sum(-1, keepdim=True) > 0, left, probs)

    def explain(self) -> str:
        return (
            "a draft token stays with probability min(1, p/q); the text depends on the drafts, but not its distribution"
        )

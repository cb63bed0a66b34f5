"""``block``: a row's drafts are verified together, which accepts more of them than one by one.

Sun et al., "Block Verification Accelerates Speculative Decoding" (2024, arXiv 2403.10444), algorithm 2.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F

from speccompile.acceptance.coins import CoinRule, offered_mass


@dataclass(frozen=True)
class Block(CoinRule):
    """Accept the longest prefix of drafts whose coin passes; each prefix has its own coin.

    On average the rule accepts at least as many drafts as ``rejection``. The acceptance of a draft may depend on the
    drafts after it. ``wrap`` refuses a drafter without probabilities: for it this rule is ``rejection``. Greedy
    requests are decided by ``exact``.
    """

    name: ClassVar[str] = "block"
    needs_draft_probs: ClassVar[bool] = True
    chains_alone: ClassVar[str] = (
        "block verification is defined for one path of drafts; use acceptance='rejection', which judges siblings"
    )

    @staticmethod
    def judge(
        probs: torch.Tensor,
        drafts: torch.Tensor,
        draft_lens: torch.Tensor,
        draft_probs: torch.Tensor | None,
        coins: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        heights, left = weigh(probs, drafts, draft_lens, draft_probs)
        prefixes = torch.arange(1, drafts.shape[1] + 1, device=drafts.device)
        return F.pad(torch.where(coins < heights, prefixes, 0), (1, 0)).amax(1), left

    def explain(self) -> str:
        return "the longest prefix of drafts that p/q of the whole prefix allows; the text depends on the drafts"


def weigh(
    probs: torch.Tensor, drafts: torch.Tensor, draft_lens: torch.Tensor, draft_probs: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The weights of prefixes, and the residuals.

    Returns:
        h_i, float32 ``[B, K]``: the probability that the first i drafts are accepted, given that no longer prefix is;
            and the mass that the target's own token is drawn from after each prefix, ``[B, K+1, V]``, not
            normalised.
    """
    count = drafts.shape[1]
    offered, ids, mass = offered_mass(probs, drafts, draft_lens, draft_probs)
    target, drafted = (tensor.gather(-1, ids)[..., 0] for tensor in (probs[:, :count], mass))
    # A draft that neither the drafter nor the target can draw is rejected.
    ratio = torch.where(target > 0, target / drafted, 0.0)
    reached = [torch.ones_like(probs[:, 0, 0])]
    for place in range(count):
        step = (reached[-1] * ratio[:, place]).clamp(max=1).nan_to_num(0.0)
        reached.append(torch.where(offered[:, place], step, 0.0))
    r = torch.stack(reached, dim=1)

    left = (r[..., None] * probs - F.pad(mass, (0, 0, 0, 1))).clamp(min=0)
    total = left.sum(-1)
    heights = torch.where((total == 0) & (r == 1), 1.0, total / (total + 1 - r))[:, 1:]
    last = torch.arange(1, count + 1, device=drafts.device) == draft_lens[:, None]
    heights = torch.where(last, r[:, 1:], heights)
    return torch.where(offered, heights, 0.0), torch.where(total[..., None] > 0, left, probs)

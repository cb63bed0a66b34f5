"""The choice among the likeliest tokens of a place by the token before it, of DFlash2.

Source: z-lab's DFlash2 (``dflash/model.py``); ``CandidateSelector`` of speculators'
``models/dflash2/model_definitions.py``.
"""

from __future__ import annotations

import torch
from torch import nn

import speccompile.ops  # noqa: F401  defines the op


class CandidateSelector(nn.Module):
    """Scores of the ``top_k`` likeliest tokens of a place: the logit of each, plus a product of three vectors of
    ``rank`` numbers, by the token before, the output at the place, and the token.

    Args:
        vocab: V.
    """

    def __init__(self, vocab: int, hidden_size: int, rank: int, top_k: int) -> None:
        super().__init__()
        self.top_k = top_k
        self.predecessor_codebook = nn.Parameter(torch.zeros(vocab, rank))
        self.successor_codebook = nn.Parameter(torch.zeros(vocab, rank))
        self.hidden_projection = nn.Linear(hidden_size, rank, bias=False)

    def forward(self, before: torch.Tensor, normed: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        """Scores ``[B, T, V]`` of the tokens after ``before``, int64 ``[B, T]``, -inf for tokens that are not among the
        ``top_k``.

        Args:
            normed: ``[B, T, M]``, the outputs at these places; logits: ``[B, T, V]``, of the lm_head.
        """
        tokens, _ = torch.ops.speccompile.likeliest(logits, self.top_k)
        ids = tokens.clamp(min=0)
        context = self.predecessor_codebook[before] * self.hidden_projection(normed)
        scores = logits.gather(-1, ids) + (context[..., None, :] * self.successor_codebook[ids]).sum(-1)
        scores = torch.where(tokens < 0, float("-inf"), scores)
        return torch.full_like(logits, float("-inf")).scatter(-1, ids, scores)

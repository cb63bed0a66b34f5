"""The bias of a draft's logits by the token before it.

Source: "DSpark" (2026, arXiv 2607.05147); ``MarkovHead`` of speculators' ``models/dspark/model_definitions.py``, of the
type ``vanilla``.
"""

from __future__ import annotations

import torch
from torch import nn


class MarkovHead(nn.Module):
    """Low-rank matrix of biases: for each token before, one of each draft token.

    Outputs of one block do not depend on the drafts of the block. With this bias each draft depends on the one before.

    Args:
        vocab: V, tokens before.
        draft_vocab: Vd, draft tokens.
    """

    def __init__(self, vocab: int, draft_vocab: int, rank: int) -> None:
        super().__init__()
        self.markov_w1 = nn.Embedding(vocab, rank)
        self.markov_w2 = nn.Linear(rank, draft_vocab, bias=False)

    def forward(self, before: torch.Tensor) -> torch.Tensor:
        """The bias ``[B, T, Vd]`` of the tokens after ``before``, int64 ``[B, T]``."""
        bias: torch.Tensor = self.markov_w2(self.markov_w1(before))
        return bias

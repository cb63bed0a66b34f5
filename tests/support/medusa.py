"""Medusa heads that are right about given texts, and what they draft."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn
from transformers import LlamaForCausalLM

from speccompile.heads import MedusaHeads


class OneAfterAnother(nn.Module):
    """Medusa heads as a module of the user's, which reads an inner layer as well."""

    def __init__(self, heads: MedusaHeads) -> None:
        super().__init__()
        self.heads = heads

    def forward(
        self, tokens: torch.Tensor, length: torch.Tensor, hidden: torch.Tensor, draft_len: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        _, last = hidden.chunk(2, dim=-1)
        return self.heads(last).argmax(-1), torch.full_like(length, draft_len)


def fitted_heads(model: LlamaForCausalLM, texts: Sequence[Sequence[int]], count: int) -> MedusaHeads:
    """Heads of one random block each, with linears that are right at most places of these texts (by least squares)."""
    heads = MedusaHeads(count, 1, model.config.hidden_size, model.config.vocab_size)
    with torch.no_grad():
        # transformers' last hidden state is that after the final norm.
        states = [model(torch.tensor([text]), output_hidden_states=True).hidden_states[-1][0] for text in texts]
        for ahead, head in enumerate(heads, 2):
            block, linear = head
            block.linear.weight.normal_(std=0.1, generator=torch.Generator().manual_seed(ahead))
            block.linear.bias.normal_(std=0.1, generator=torch.Generator().manual_seed(ahead))
            inputs = torch.cat([block(state[:-ahead]) for state in states])
            wanted = torch.cat([torch.tensor(text[ahead:]) for text in texts])
            one_hot = nn.functional.one_hot(wanted, model.config.vocab_size).float()
            linear.weight.copy_(torch.linalg.lstsq(inputs, one_hot).solution.T)
    return heads.eval()


def drafts_of(hidden: torch.Tensor, heads: MedusaHeads) -> list[int]:
    """Draft tokens after the last hidden state that the target has read, ``[M]``, written from the paper: ``p_k =
    softmax(W2_k (silu(W1_k h + b_k) + h))``."""
    drafts = []
    for block, linear in heads:
        inner = hidden + nn.functional.silu(block.linear.weight @ hidden + block.linear.bias)
        drafts.append(int((linear.weight @ inner).argmax()))
    return drafts

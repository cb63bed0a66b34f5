"""The attention of a head's layers (EAGLE, EAGLE-3). It is Llama's or, with norms of queries and keys, Qwen3's."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import nn

from speccompile.modes.network.draft_head import RowAttention
from speccompile.modes.network.layers import RMSNorm, rotated


class AttentionSizes(Protocol):
    """The fields of a head's config that its attention reads."""

    @property
    def hidden_size(self) -> int:
        """M, the size of the output."""

    @property
    def num_attention_heads(self) -> int:
        """H, the number of query heads."""

    @property
    def num_key_value_heads(self) -> int:
        """G, the number of KV heads."""

    @property
    def head_dim(self) -> int:
        """D, the size of a head."""

    @property
    def rms_norm_eps(self) -> float:
        """The epsilon of norms."""


class HeadAttention(nn.Module):
    """Attention of a head's layer. Its input can be twice as wide as its output.

    Args:
        inputs: the size of the input.
        layer: the layer's index.
        bias: the projections of queries, keys and values have a bias.
        out_bias: so has the output's; None is as ``bias``.
        qk_norm: queries and keys have an RMSNorm over each head.
    """

    def __init__(
        self,
        config: AttentionSizes,
        inputs: int,
        layer: int,
        *,
        bias: bool = False,
        out_bias: bool | None = None,
        qk_norm: bool = False,
    ) -> None:
        super().__init__()
        self.layer, self.head_dim, self.qk_norm = layer, config.head_dim, qk_norm
        queries = config.num_attention_heads * config.head_dim
        keys = config.num_key_value_heads * config.head_dim
        self.q_proj = nn.Linear(inputs, queries, bias=bias)
        self.k_proj = nn.Linear(inputs, keys, bias=bias)
        self.v_proj = nn.Linear(inputs, keys, bias=bias)
        self.o_proj = nn.Linear(queries, config.hidden_size, bias=bias if out_bias is None else out_bias)
        if qk_norm:
            self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps)
            self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps)

    def forward(
        self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, cache: RowAttention, window: int | None = None
    ) -> torch.Tensor:
        """``[B, T, M]`` of ``x`` ``[B, T, inputs]``; cos, sin: ``[B, T, D]``."""
        query, key, value = (self._heads(project(x)) for project in (self.q_proj, self.k_proj, self.v_proj))
        if self.qk_norm:
            query, key = self.q_norm(query), self.k_norm(key)
        query, key = rotated(query, cos, sin), rotated(key, cos, sin)
        attended = cache.attend(self.layer, query, key, value, self.head_dim**-0.5, window)
        out: torch.Tensor = self.o_proj(attended.flatten(2))
        return out

    def _heads(self, x: torch.Tensor) -> torch.Tensor:
        return x.unflatten(-1, (-1, self.head_dim))

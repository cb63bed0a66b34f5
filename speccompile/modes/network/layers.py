"""Parts of the decoder layers of draft heads: Llama's, over sizes of the head."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch
from torch import nn
from transformers import LlamaConfig
from transformers.activations import ACT2FN
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from speccompile.errors import InvalidHead, error_line

#: Rotary tables of these kinds change with the length of the text.
CHANGING_ROPE = ("dynamic", "longrope")


class LayerSizes(Protocol):
    """What a head's config says of its layers."""

    @property
    def hidden_size(self) -> int:
        """M."""

    @property
    def intermediate_size(self) -> int:
        """Width of the MLP."""

    @property
    def num_attention_heads(self) -> int:
        """H."""

    @property
    def head_dim(self) -> int:
        """D."""

    @property
    def hidden_act(self) -> str:
        """Name of the MLP's activation, as transformers has it."""

    @property
    def max_position_embeddings(self) -> int:
        """Number of positions that the head was trained for."""

    @property
    def rope(self) -> Mapping[str, Any]:
        """Parameters of the rotary table, as transformers' ``rope_parameters``."""


class RMSNorm(nn.Module):
    """Computed in float32, as Llama's."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return rms_norm(x, self.weight, self.eps)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Root mean square norm over the last dimension, computed in float32. Source: transformers' ``LlamaRMSNorm``."""
    wide = x.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return weight * wide.to(x.dtype)


class Rotary(nn.Module):
    """Sines and cosines of positions, by any of transformers' rules that does not change with the text's length."""

    inv_freq: torch.Tensor

    def __init__(self, config: LayerSizes, source: str) -> None:
        super().__init__()
        if config.rope.get("rope_type", "default") in CHANGING_ROPE:
            reason = f"its rotary table ({config.rope['rope_type']}) changes with the length of the text"
            raise InvalidHead(source=source, reason=reason)
        try:
            table = LlamaRotaryEmbedding(
                LlamaConfig(
                    # It knows no head whose attention is wider than its hidden states.
                    hidden_size=config.num_attention_heads * config.head_dim,
                    num_attention_heads=config.num_attention_heads,
                    head_dim=config.head_dim,
                    max_position_embeddings=config.max_position_embeddings,
                    rope_parameters=dict(config.rope),
                )
            )
        except Exception as error:
            reason = f"transformers cannot make its rotary table of {dict(config.rope)}: {error_line(error)}"
            raise InvalidHead(source=source, reason=reason) from error
        self.scaling = float(table.attention_scaling)
        self.register_buffer("inv_freq", table.inv_freq.float().clone(), persistent=False)

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Rotary:
        # Rounded to half precision, frequencies turn far positions by another angle.
        exact = self.inv_freq
        super()._apply(fn, recurse)
        self.inv_freq = exact.to(self.inv_freq.device)
        return self

    def forward(self, position_ids: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """``position_ids`` ``[B, T]``; cosines and sines ``[B, T, 1, D]``."""
        angles = position_ids[..., None].float() * self.inv_freq.float()
        angles = torch.cat([angles, angles], dim=-1)[:, :, None]
        cos, sin = angles.cos(), angles.sin()
        if self.scaling != 1.0:
            cos, sin = cos * self.scaling, sin * self.scaling
        return cos.to(dtype), sin.to(dtype)


def rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """``[B, T, heads, D]``, halves turned against each other as in Llama."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-second, first], dim=-1) * sin


class MLP(nn.Module):
    """Gated MLP of a Llama layer."""

    def __init__(self, config: LayerSizes, *, bias: bool = False) -> None:
        super().__init__()
        inner = config.intermediate_size
        self.gate_proj = nn.Linear(config.hidden_size, inner, bias=bias)
        self.up_proj = nn.Linear(config.hidden_size, inner, bias=bias)
        self.down_proj = nn.Linear(inner, config.hidden_size, bias=bias)
        self.act = ACT2FN[config.hidden_act]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.down_proj(self.act(self.gate_proj(x)) * self.up_proj(x))
        return out

"""Parts of the decoder layers of draft heads. They are those of Llama, with the head's sizes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch
from torch import nn
from transformers import LlamaConfig
from transformers.activations import ACT2FN
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from speccompile.errors import InvalidHead, error_line

#: Kinds of rotary tables that change with the length of the sequence.
CHANGING_ROPE = ("dynamic", "longrope")


class LayerSizes(Protocol):
    """The fields of a head's config that its layers read."""

    @property
    def hidden_size(self) -> int:
        """M, the hidden size."""

    @property
    def intermediate_size(self) -> int:
        """Width of the MLP."""

    @property
    def num_attention_heads(self) -> int:
        """H, the number of query heads."""

    @property
    def head_dim(self) -> int:
        """D, the size of a head of the attention."""

    @property
    def hidden_act(self) -> str:
        """The name of the MLP's activation, one of transformers' names."""

    @property
    def max_position_embeddings(self) -> int:
        """The number of positions that the head was trained for."""

    @property
    def rope(self) -> Mapping[str, Any]:
        """The parameters of the rotary table, in the form of transformers' ``rope_parameters``."""


class RMSNorm(nn.Module):
    """Root mean square norm over the last dimension, computed in float32, like Llama's."""

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


class RotaryTable(nn.Module):
    """Sines and cosines of positions.

    Args:
        inv_freq: ``[D / 2]``; scaling: a factor of the sines and cosines.
    """

    inv_freq: torch.Tensor

    def __init__(self, inv_freq: torch.Tensor, scaling: float) -> None:
        super().__init__()
        self.scaling = float(scaling)
        self.register_buffer("inv_freq", inv_freq.float().clone(), persistent=False)

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> RotaryTable:
        # Frequencies stay exact: with frequencies in half precision, the angles of far positions are wrong.
        exact = self.inv_freq
        super()._apply(fn, recurse)
        self.inv_freq = exact.to(self.inv_freq.device)
        return self

    def forward(self, position_ids: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and sines ``[B, T, D]`` of ``position_ids`` ``[B, T]``."""
        angles = position_ids[..., None].float() * self.inv_freq.float()
        angles = torch.cat([angles, angles], dim=-1)
        cos, sin = angles.cos(), angles.sin()
        if self.scaling != 1.0:
            cos, sin = cos * self.scaling, sin * self.scaling
        return cos.to(dtype), sin.to(dtype)


class Rotary(RotaryTable):
    """Sines and cosines of positions, by one of transformers' rules that do not depend on the sequence's length.

    Raises:
        InvalidHead: the rule depends on the sequence's length, or its parameters are not valid.
    """

    def __init__(self, config: LayerSizes, source: str) -> None:
        if config.rope.get("rope_type", "default") in CHANGING_ROPE:
            kind = config.rope["rope_type"]
            reason = f"its rotary table ({kind}) depends on the sequence's length, which is not supported"
            raise InvalidHead(source=source, reason=reason)
        try:
            table = LlamaRotaryEmbedding(
                LlamaConfig(
                    # LlamaConfig requires this product; a head's attention can be wider than its hidden size.
                    hidden_size=config.num_attention_heads * config.head_dim,
                    num_attention_heads=config.num_attention_heads,
                    head_dim=config.head_dim,
                    max_position_embeddings=config.max_position_embeddings,
                    rope_parameters=dict(config.rope),
                )
            )
        except Exception as error:
            reason = f"transformers cannot create its rotary table from {dict(config.rope)}: {error_line(error)}"
            raise InvalidHead(source=source, reason=reason) from error
        super().__init__(table.inv_freq, table.attention_scaling)


def rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """``x`` ``[B, T, heads, D]``, rotated by ``cos`` and ``sin`` ``[B, T, D]``: halves are exchanged, as in Llama's
    ``apply_rotary_pos_emb``."""
    half = x.shape[-1] // 2
    turned = torch.cat([-x[..., half:], x[..., :half]], dim=-1)
    return x * cos[:, :, None] + turned * sin[:, :, None]


class MLP(nn.Module):
    """The gated MLP of a Llama layer."""

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

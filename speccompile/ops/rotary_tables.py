"""Cosines and sines of positions for rotary embeddings, as one op."""

from __future__ import annotations

import torch

from speccompile.ops.cpu.library import BASE
from speccompile.ops.define import define


def reference(positions: torch.Tensor, inv_freq: torch.Tensor, scaling: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines ``[B, T, R]``, float32, of each position times each frequency, twice side by side.

    Args:
        positions: int64 ``[B, T]``.
        inv_freq: float32 ``[R / 2]``.
        scaling: a factor of both tables.

    Source:
        ``LlamaRotaryEmbedding.forward`` of transformers' ``models/llama/modeling_llama.py``.
    """
    angles = positions[..., None].float() * inv_freq
    angles = torch.cat([angles, angles], dim=-1)
    return angles.cos() * scaling, angles.sin() * scaling


def _fake(positions, inv_freq, scaling):  # type: ignore[no-untyped-def]
    shape = (*positions.shape, 2 * inv_freq.shape[0])
    return inv_freq.new_empty(shape), inv_freq.new_empty(shape)


define(
    "rotary_tables(Tensor positions, Tensor inv_freq, float scaling) -> (Tensor, Tensor)",
    _fake,
    reference,
    native=BASE,
    recorded=True,
)

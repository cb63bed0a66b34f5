"""The short causal convolution of recurrent layers: each channel over its own newest inputs.

``native_`` is the C++ form (``ops/cpu/csrc/recurrence/recurrence.cpp``). Source: ``causal_conv1d_fn`` of transformers'
models (``models/qwen3_next/modeling_qwen3_next.py``).
"""

from __future__ import annotations

import torch

from speccompile.ops.define import define
from speccompile.ops.recurrence import keep, rows_of

_SCHEMA = (
    "(Tensor x, Tensor weight, Tensor? bias, Tensor(a!) kept, Tensor slots, Tensor positions, Tensor settled) -> Tensor"
)


def reference(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    kept: torch.Tensor,
    slots: torch.Tensor,
    positions: torch.Tensor,
    settled: torch.Tensor,
) -> torch.Tensor:
    """``y[t, c] = bias[c] + sum over w of weight[c, w] * x[t - W + 1 + w, c]``, in the order of w.

    Inputs of positions before 0 are zero. Of settled tokens the newest W - 1 inputs stay: they are all the state there
    is, so there is nothing to absorb.

    Args:
        x: float32 ``[B, T, C]``.
        weight: float32 ``[C, W]``; bias: float32 ``[C]``.
        kept: float32 ``[N, R, C]`` with R at least W - 1 and the drafts of a step; written.
        slots, positions, settled: see :mod:`speccompile.ops.recurrence`.

    Returns:
        float32 ``[B, T, C]``.
    """
    size, width, window = kept.shape[1], x.shape[1], weight.shape[1]
    out = x.new_empty(x.shape)
    for at in rows_of(slots, positions, positions[:, 0], settled, size):
        before = range(at.first - window + 1, at.first)
        past = [kept[at.slot, p % size] if p >= 0 else torch.zeros_like(x[0, 0]) for p in before]
        text = torch.stack([*past, *x[at.row]])
        total = torch.zeros_like(x[at.row]) if bias is None else bias.expand(width, -1)
        for tap in range(window):
            total = total + weight[:, tap] * text[tap : tap + width]
        out[at.row] = total
        keep(kept, x, at, at.settled - window + 1)
    return out


define(
    "causal_conv_" + _SCHEMA,
    lambda x, *_: x.new_empty(x.shape),
    reference,
    key="CPU",
    native="recurrence",
    cuda="causal_conv.causal_conv",
)

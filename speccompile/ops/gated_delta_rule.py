"""The gated delta rule, a linear attention whose state forgets and corrects itself.

``native_`` is the C++ form (``ops/cpu/csrc/recurrence/recurrence.cpp``). Sources: Yang et al., "Gated Delta Networks"
(2025), section 3; for a gate of each channel, Kimi Team, "Kimi Linear" (2025), section 3. The order of operations is
that of ``torch_recurrent_gated_delta_rule`` (transformers, ``models/qwen3_next/modeling_qwen3_next.py``).
"""

from __future__ import annotations

import torch

from speccompile.ops.define import define
from speccompile.ops.recurrence import CURSOR_SCHEMA, rows_of, scan

_SCHEMA = (
    "(Tensor q, Tensor k, Tensor v, Tensor gate, Tensor beta, Tensor(a!) state, Tensor(b!) kept, "
    f"{CURSOR_SCHEMA}) -> Tensor"
)


def reference(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    gate: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor,
    kept: torch.Tensor,
    slots: torch.Tensor,
    positions: torch.Tensor,
    absorbed: torch.Tensor,
    settled: torch.Tensor,
) -> torch.Tensor:
    """For each head: ``S = exp(gate) * S; S = S + k (beta * (v - k S)); y = q S``. All tensors are float32.

    Args:
        q, k: ``[B, T, G, D]``, normalised and scaled; H / G consecutive heads share those of one group.
        v: ``[B, T, H, Dv]``.
        gate: logarithm of the decay, ``[B, T, H, 1]``, or ``[B, T, H, D]`` for one decay of each channel.
        beta: ``[B, T, H]``.
        state: ``[N, H, D, Dv]``, written.
        kept: ``[N, R, F]`` of the inputs k, v, gate and beta, side by side; written.
        slots, positions, absorbed, settled: see :mod:`speccompile.ops.recurrence`.

    Returns:
        ``[B, T, H, Dv]``.
    """
    given = k, v, gate, beta
    sizes = [item[0, 0].numel() for item in given]
    inputs = torch.cat([item.flatten(2) for item in given], dim=2)
    group = v.shape[2] // k.shape[2]
    out = v.new_empty(v.shape)

    def advance(now: torch.Tensor, place: torch.Tensor) -> torch.Tensor:
        parts = zip(place.split(sizes), given, strict=True)
        key, value, decay, rate = (part.view(item.shape[2:]) for part, item in parts)
        key = key.repeat_interleave(group, dim=0)
        now = now * decay.exp()[:, :, None]
        change = (value - (now * key[:, :, None]).sum(1)) * rate[:, None]
        return now + key[:, :, None] * change[:, None]

    def read(now: torch.Tensor, row: int, place: int) -> None:
        out[row, place] = (now * q[row, place].repeat_interleave(group, dim=0)[:, :, None]).sum(1)

    scan(state, kept, inputs, rows_of(slots, positions, absorbed, settled, kept.shape[1]), advance, read)
    return out


define(
    "gated_delta_rule_" + _SCHEMA,
    lambda q, k, v, *_: v.new_empty(v.shape),
    reference,
    key="CPU",
    native="recurrence",
    cuda="gated_delta_rule.gated_delta_rule",
)

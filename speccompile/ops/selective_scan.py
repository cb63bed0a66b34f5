"""The selective scan of state space models: Mamba's, and Mamba-2's with one decay for each head.

``native_`` is the C++ form (``ops/cpu/csrc/recurrence/recurrence.cpp``). Sources: Gu and Dao, "Mamba" (2023),
algorithm 2; Dao and Gu, "Transformers are SSMs" (2024), equation 1.
"""

from __future__ import annotations

import torch

from speccompile.ops.define import define
from speccompile.ops.recurrence import CURSOR_SCHEMA, rows_of, scan

_SCHEMA = (
    f"(Tensor x, Tensor dt, Tensor A, Tensor B, Tensor C, Tensor(a!) state, Tensor(b!) kept, {CURSOR_SCHEMA}) -> Tensor"
)


def reference(
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    state: torch.Tensor,
    kept: torch.Tensor,
    slots: torch.Tensor,
    positions: torch.Tensor,
    absorbed: torch.Tensor,
    settled: torch.Tensor,
) -> torch.Tensor:
    """For each head: ``h = exp(dt * A) * h + (dt * x) B; y = h C``. All tensors are float32.

    Args:
        x: ``[B, T, H, P]``. Mamba has a head for each channel, and P = 1.
        dt: ``[B, T, H]``, the size of the time step.
        A: ``[H, 1]``, or ``[H, M]`` for one decay of each place of the state.
        B, C: ``[B, T, G, M]``; H / G consecutive heads share those of one group.
        state: ``[N, H, P, M]``, written.
        kept: ``[N, R, F]`` of the inputs x, dt and B, side by side; written.
        slots, positions, absorbed, settled: see :mod:`speccompile.ops.recurrence`.

    Returns:
        ``[B, T, H, P]``.
    """
    given = x, dt, B
    sizes = [item[0, 0].numel() for item in given]
    inputs = torch.cat([item.flatten(2) for item in given], dim=2)
    group = x.shape[2] // B.shape[2]
    out = x.new_empty(x.shape)

    def advance(now: torch.Tensor, place: torch.Tensor) -> torch.Tensor:
        value, step, key = (part.view(item.shape[2:]) for part, item in zip(place.split(sizes), given, strict=True))
        decay = (step[:, None] * A).exp()[:, None]
        return now * decay + (step[:, None] * value)[:, :, None] * key.repeat_interleave(group, dim=0)[:, None]

    def read(now: torch.Tensor, row: int, place: int) -> None:
        out[row, place] = (now * C[row, place].repeat_interleave(group, dim=0)[:, None]).sum(2)

    scan(state, kept, inputs, rows_of(slots, positions, absorbed, settled, kept.shape[1]), advance, read)
    return out


define(
    "selective_scan_" + _SCHEMA,
    lambda x, *_: x.new_empty(x.shape),
    reference,
    key="CPU",
    native="recurrence",
    cuda="selective_scan.selective_scan",
)

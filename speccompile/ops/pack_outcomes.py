"""The results of a run for the host as one tensor: ONE op, in C++ on a CPU (``ops/cpu/csrc/base/ops/outcome_ops.cpp``).

It runs after every step. Each of its dozen torch calls would find its code and tables outside of the caches, which the
step has filled with weights.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from speccompile.ops.cpu.library import BASE
from speccompile.ops.define import define


def reference(
    emitted: torch.Tensor,
    accepted: torch.Tensor,
    proposed: torch.Tensor,
    alive: torch.Tensor,
    length: torch.Tensor,
    tokens: torch.Tensor,
    width: int,
    others: Sequence[torch.Tensor],
) -> torch.Tensor:
    """Emitted, accepted and proposed tokens of each slot, whether it is alive, its ``width`` tokens after the position
    ``length - emitted``, and ``others``: int64 ``[columns, N]``. Floats become the bits of their float64.

    Args:
        emitted, accepted, proposed, length: int64 ``[N]``; alive: bool ``[N]``; tokens: int64 ``[N, S]``.
        others: int64 or float32, ``[N]`` or ``[N, K]``.
    """
    # In bounds for any slot: there are T positions after max_len.
    positions = (length - emitted)[:, None] + torch.arange(width, device=length.device)
    columns = torch.stack([emitted, accepted, proposed, alive.long()])
    return torch.cat([columns, tokens.gather(1, positions).T, *map(_integers, others)])


def _integers(state: torch.Tensor) -> torch.Tensor:
    """Convert ``[N]`` or ``[N, K]`` to int64 ``[1, N]`` or ``[K, N]``."""
    if state.is_floating_point():
        state = state.double().view(torch.int64)
    return state.reshape(len(state), -1).T


def _fake(emitted, accepted, proposed, alive, length, tokens, width, others):  # type: ignore[no-untyped-def]
    slots = emitted.shape[0]
    return emitted.new_empty((4 + width + sum(other.numel() // slots for other in others), slots))


define(
    "pack_outcomes(Tensor emitted, Tensor accepted, Tensor proposed, Tensor alive, Tensor length, Tensor tokens, "
    "int width, Tensor[] others) -> Tensor",
    _fake,
    reference,
    cpp=BASE,
    recorded=True,
)

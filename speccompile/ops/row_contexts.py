"""The sequence of each row with the drafts of the step after it, from state, as ONE op. On a CPU it is C++
(``ops/cpu/csrc/base/ops/row_ops.cpp``)."""

from __future__ import annotations

import torch

from speccompile.ops.cpu.library import BASE
from speccompile.ops.define import define


def reference(
    tokens: torch.Tensor, length: torch.Tensor, slots: torch.Tensor, drafts: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Each row's committed tokens and drafts, int64 ``[B, S]``, and the number of committed tokens, int64 ``[B]``.

    Args:
        tokens: int64 ``[N, S]``; length: int64 ``[N]``; slots: int64 ``[B]``; drafts: int64 ``[B, K]``.
    """
    row_length = length[slots]
    return put_tokens(tokens[slots], row_length, drafts), row_length


def put_tokens(context: torch.Tensor, row_length: torch.Tensor, drafts: torch.Tensor) -> torch.Tensor:
    """``context`` ``[B, S]`` with ``drafts`` ``[B, K]`` from ``row_length`` ``[B]`` on."""
    places = row_length[:, None] + torch.arange(drafts.shape[1], device=drafts.device)
    # A row that is about to end may reach beyond the cache, where nothing is ever read.
    places = places.clamp(max=context.shape[1] - 1)
    return context.scatter(1, places, drafts)


def _fake(tokens, length, slots, drafts):  # type: ignore[no-untyped-def]
    return tokens.new_empty((slots.shape[0], tokens.shape[1])), torch.empty_like(slots)


define(
    "row_contexts(Tensor tokens, Tensor length, Tensor slots, Tensor drafts) -> (Tensor, Tensor)",
    _fake,
    reference,
    cpp=BASE,
    recorded=True,
)

"""Tokens and hidden states that a drafter has not read yet.

A head also reads hidden states of the target, which are kept at the newest positions of each sequence, in state ``[N,
P, M]``. The entry of a position is its remainder by P. The C++ is ``ops/cpu/csrc/base/ops/unread_ops.cpp``.
"""

from __future__ import annotations

import torch

from speccompile.ops.cpu.library import BASE
from speccompile.ops.define import define
from speccompile.ops.draft_rows import tokens_after


def keep_unread_(kept: torch.Tensor, slots: torch.Tensor, positions: torch.Tensor, hidden: torch.Tensor) -> None:
    """Write ``hidden`` ``[B, T, M]`` at these positions into ``kept`` ``[N, P, M]``. T is at most P.

    Args:
        slots: int64 ``[B]``; positions: int64 ``[B, T]``.
    """
    kept.index_put_((slots[:, None], positions % kept.shape[1]), hidden)


def unread_rows(
    kept: torch.Tensor, read_len: torch.Tensor, tokens: torch.Tensor, slots: torch.Tensor, width: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The next ``width`` rows of the head in each sequence: the tokens ``[B, W]`` that they read, their positions ``[B,
    W]``, and the hidden states ``[B, W, M]``. Rows after the newest one have arbitrary values.

    Args:
        kept: ``[N, P, M]``; read_len: int64 ``[N]``, the number of rows that the head has computed; tokens: int64 ``[N,
            S]``; slots: int64 ``[B]``.
    """
    _, positions = unread_tokens(read_len, tokens, slots, width)
    return tokens_after(tokens, slots, positions), positions, kept[slots[:, None], positions % kept.shape[1]]


def unread_tokens(
    read_len: torch.Tensor, tokens: torch.Tensor, slots: torch.Tensor, width: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The next ``width`` tokens ``[B, W]`` of each sequence for a draft model, and their positions ``[B, W]``.

    Args:
        read_len, tokens, slots: see :func:`unread_rows`.
    """
    positions = read_len[slots][:, None] + torch.arange(width, device=slots.device)
    positions = positions.clamp(max=tokens.shape[1] - 1)
    return tokens[slots[:, None], positions], positions


def note_read_(read_len: torch.Tensor, length: torch.Tensor, slots: torch.Tensor, width: int) -> None:
    """Count the rows of :func:`unread_rows` or :func:`unread_tokens` as computed, up to position ``length - 2``.

    Args:
        read_len, length: int64 ``[N]``; slots: int64 ``[B]``.
    """
    read = read_len[slots]
    read_len.index_put_((slots,), torch.maximum(read, torch.minimum(read + width, length[slots] - 1)))


define(
    "keep_unread_(Tensor(a!) kept, Tensor slots, Tensor positions, Tensor hidden) -> ()",
    None,
    keep_unread_,
    cpp=BASE,
    recorded=True,
)
define(
    "unread_rows(Tensor kept, Tensor read_len, Tensor tokens, Tensor slots, int width) -> (Tensor, Tensor, Tensor)",
    lambda kept, read_len, tokens, slots, width: (
        tokens.new_empty((slots.shape[0], width)),
        tokens.new_empty((slots.shape[0], width)),
        kept.new_empty((slots.shape[0], width, kept.shape[2])),
    ),
    unread_rows,
    cpp=BASE,
    recorded=True,
)
define(
    "unread_tokens(Tensor read_len, Tensor tokens, Tensor slots, int width) -> (Tensor, Tensor)",
    lambda read_len, tokens, slots, width: (
        tokens.new_empty((slots.shape[0], width)),
        tokens.new_empty((slots.shape[0], width)),
    ),
    unread_tokens,
    cpp=BASE,
    recorded=True,
)
define(
    "note_read_(Tensor(a!) read_len, Tensor length, Tensor slots, int width) -> ()",
    None,
    note_read_,
    cpp=BASE,
    recorded=True,
)

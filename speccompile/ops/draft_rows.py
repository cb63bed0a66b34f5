"""Reads of the rows' texts by drafters, and writes of their state, as ops in C++ on a CPU.

The C++ is ``ops/cpu/csrc/base/ops/draft_ops.cpp``. Elsewhere passes insert the functions: on CUDA a compiler joins
their ops with those around them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Set
from typing import Any

import torch

from speccompile.ops.cpu.library import BASE
from speccompile.ops.define import define


def newest_tokens(
    tokens: torch.Tensor,
    length: torch.Tensor,
    limit: torch.Tensor,
    slots: torch.Tensor,
    draft_len: int,
    max_len: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The newest committed token ``[B, 1]``, its position ``[B, 1]``, and the rows' draft lengths ``[B]``: as many
    drafts as a step could emit, up to the drafter's ``max_len``.

    Args:
        tokens: int64 ``[N, S]``; length, limit: int64 ``[N]``; slots: int64 ``[B]``.
    """
    row_length = length[slots]
    position = (row_length - 1).clamp(min=0)
    longest = (max_len - 1 - row_length).clamp(min=0, max=draft_len)
    lens = torch.minimum(longest, limit[slots] - row_length - 1).clamp(min=0)
    return tokens[slots, position][:, None], position[:, None], lens


def next_token(
    drawn: torch.Tensor, position: torch.Tensor, ids: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The next token ``[B, 1]``, an arbitrary one where none could be ``drawn``, and its position.

    Args:
        drawn: int64 ``[B, 1]``: tokens, or places in ``ids``.
        position: int64 ``[B, 1]``, that of the token before.
        ids: int64 ``[Vd]``, the target's ids of a drafter's own vocabulary.
    """
    token = drawn.clamp(min=0)
    return token if ids is None else ids[token].clamp(min=0), position + 1


def tokens_after(tokens: torch.Tensor, slots: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """The token after each position, ``[B, T]``; an arbitrary token after the end of the sequence.

    Args:
        tokens: int64 ``[N, S]``; slots: int64 ``[B]``; positions: int64 ``[B, T]``.
    """
    return tokens[slots[:, None], (positions + 1).clamp(max=tokens.shape[1] - 1)]


def store_newest_(
    newest: torch.Tensor,
    length: torch.Tensor,
    slots: torch.Tensor,
    positions: torch.Tensor,
    hidden: torch.Tensor,
    dummy_slot: int,
) -> None:
    """Write ``hidden`` ``[B, T, H]`` at the position ``length - 2`` into ``newest`` ``[N, H]``.

    If one slot has several rows (a prompt in a mixed step), at most one of them has that position. The others write to
    the dummy slot.
    """
    at = length[slots] - 2 - positions[:, 0]
    inside = (at >= 0) & (at < hidden.shape[1])
    rows = torch.arange(hidden.shape[0], device=hidden.device)
    found = hidden[rows, at.clamp(0, hidden.shape[1] - 1)]
    newest.index_put_((torch.where(inside, slots, dummy_slot),), found)


def rows_of(state: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """The entries ``[B, ...]`` of ``state`` ``[N, ...]`` for the rows' slots, int64 ``[B]``."""
    return state[slots]


def cut_drafts(tokens: torch.Tensor, lens: torch.Tensor, begin: int) -> torch.Tensor:
    """Drafts ``[B, K]`` from number ``begin`` of the rows on, -1 after a row's own draft length.

    Args:
        tokens: int64 ``[B, K]``; lens: int64 ``[B]``.
    """
    numbers = torch.arange(begin, begin + tokens.shape[1], device=tokens.device)
    return torch.where(numbers < lens[:, None], tokens, -1)


def store_chain_(
    stored_drafts: torch.Tensor,
    stored_lens: torch.Tensor,
    slots: torch.Tensor,
    drafts: torch.Tensor,
    lens: torch.Tensor,
    begin: int,
) -> None:
    """Write the rows' drafts ``[B, K]``, from number ``begin`` on, and their lengths ``[B]`` into state.

    Args:
        stored_drafts: int64 ``[N, Kmax]``; stored_lens: int64 ``[N]``; slots: int64 ``[B]``.
    """
    numbers = torch.arange(begin, begin + drafts.shape[1], device=drafts.device)
    stored_drafts.index_put_((slots[:, None], numbers), drafts)
    stored_lens.index_put_((slots,), lens)


def network_positions(positions: torch.Tensor, back: int, most: int) -> torch.Tensor:
    """The positions ``[B, T]`` of a drafter's own forward: ``back`` before the given ones, from 0 to ``most``.

    Args:
        positions: int64 ``[B, T]``.
    """
    moved = positions - back if back else positions
    return moved.clamp(min=0, max=most)


def side_by_side(*parts: torch.Tensor) -> torch.Tensor:
    """All ``parts`` ``[..., M_i]``, of one dtype, concatenated along their last dimension."""
    return torch.cat(parts, dim=-1)


def form_of(function: Callable[..., Any], facts: Set[str]) -> Callable[..., Any]:
    """Return what a pass inserts for one of these functions: the op of its name where steps run the C++ ops, which the
    graph's ``facts`` show, else the function."""
    if "linears_fused" not in facts:
        return function
    op: Callable[..., Any] = getattr(torch.ops.speccompile, function.__name__)
    return _of_list(op) if function is side_by_side else op


@functools.cache
def _of_list(op: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *parts: op(parts)


def _newest_fake(tokens, length, limit, slots, draft_len, max_len):  # type: ignore[no-untyped-def]
    rows = slots.shape[0]
    return tokens.new_empty((rows, 1)), tokens.new_empty((rows, 1)), tokens.new_empty((rows,))


def _define(schema: str, fake: Callable[..., Any] | None, reference: Callable[..., Any], name: str = "") -> None:
    define((name or reference.__name__) + schema, fake, reference, cpp=BASE, recorded=True)


_define(
    "(Tensor tokens, Tensor length, Tensor limit, Tensor slots, int draft_len, int max_len) "
    "-> (Tensor, Tensor, Tensor)",
    _newest_fake,
    newest_tokens,
)
_define(
    "(Tensor drawn, Tensor position, Tensor? ids=None) -> (Tensor, Tensor)",
    lambda drawn, position, ids=None: (drawn.new_empty(drawn.shape), position.new_empty(position.shape)),
    next_token,
)
_define(
    "(Tensor tokens, Tensor slots, Tensor positions) -> Tensor",
    lambda tokens, slots, positions: positions.new_empty(positions.shape),
    tokens_after,
)
_define(
    "(Tensor(a!) newest, Tensor length, Tensor slots, Tensor positions, Tensor hidden, int dummy_slot) -> ()",
    None,
    store_newest_,
)
_define(
    "(Tensor state, Tensor slots) -> Tensor",
    lambda state, slots: state.new_empty((slots.shape[0], *state.shape[1:])),
    rows_of,
)
_define(
    "(Tensor tokens, Tensor lens, int begin) -> Tensor",
    lambda tokens, lens, begin: tokens.new_empty(tokens.shape),
    cut_drafts,
)
_define(
    "(Tensor(a!) stored_drafts, Tensor(b!) stored_lens, Tensor slots, Tensor drafts, Tensor lens, int begin) -> ()",
    None,
    store_chain_,
)
_define(
    "(Tensor[] parts) -> Tensor",
    lambda parts: parts[0].new_empty((*parts[0].shape[:-1], sum(part.shape[-1] for part in parts))),
    lambda parts: side_by_side(*parts),
    name="side_by_side",
)
_define(
    "(Tensor positions, int back, int most) -> Tensor",
    lambda positions, back, most: positions.new_empty(positions.shape),
    network_positions,
)

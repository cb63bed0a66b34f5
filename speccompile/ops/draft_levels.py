"""Levels of a tree that a network drafts, as ops in C++ on a CPU.

The C++ is ``ops/cpu/csrc/base/ops/draft_level_ops.cpp``. Passes insert what :func:`speccompile.ops.draft_rows.form_of`
returns for these functions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby
from math import inf
from typing import Any

import torch

from speccompile.ops.cpu.library import BASE
from speccompile.ops.define import define
from speccompile.ops.numbers import numbers


def _by_chance(chances: torch.Tensor) -> torch.Tensor:
    """The indices ``[B, n]`` of ``chances`` ``[B, n]``, the greatest first, and of equal ones the first: a parent stays
    before its child. NaN counts as the chance 0."""
    return torch.where(chances > -inf, chances, -inf).sort(dim=1, descending=True, stable=True).indices


def ranked(
    tokens: torch.Tensor, chances: torch.Tensor, parents: torch.Tensor, nodes: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The ``nodes`` likeliest tokens and their parents, ``[B, nodes]``.

    Args:
        tokens: int64 ``[B, n]``, those of a level after all of the level before.
        chances: float ``[B, n]``, cumulative log-probabilities: no child's is greater than its parent's.
        parents: int64 ``[B, n]``, 0 for the newest committed token, else the index of the parent plus one.
    """
    order = _by_chance(chances)
    places = torch.arange(1, tokens.shape[1] + 1, device=tokens.device).expand(order.shape)
    number = torch.zeros_like(order).scatter(1, order, places)
    parents = torch.where(parents == 0, 0, number.gather(1, (parents - 1).clamp(min=0)))
    order = order[:, :nodes]
    return tokens.gather(1, order), parents.gather(1, order)


def next_level(
    tokens: torch.Tensor,
    logprobs: torch.Tensor,
    chances: torch.Tensor | None = None,
    index: torch.Tensor | None = None,
    first: int = 0,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The tokens of a level, their cumulative log-probabilities, and their parents (0 for the text's end, else the
    index among all proposed tokens plus one), ``[B, m * count]``.

    Args:
        tokens: int64 ``[B, m, count]``; logprobs: float32, of the same size.
        chances, index: but for the first level, the nodes' own cumulative log-probabilities, and the index of each in
            its level, ``[B, m]``.
        first: the index of the first token of the nodes' own level.
    """
    if chances is None or index is None:
        return tokens.flatten(1).clone(), logprobs.flatten(1).clone(), torch.zeros_like(tokens).flatten(1)
    parents = (index + (first + 1))[..., None].expand(tokens.shape)
    return tokens.flatten(1).clone(), (chances[..., None] + logprobs).flatten(1), parents.flatten(1).clone()


def as_target_ids(tokens: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """The target's ids of ``tokens`` (-1: none), int64 of any size, which are places in ``ids``, int64 ``[Vd]``."""
    return torch.where(tokens < 0, -1, ids[tokens.clamp(min=0)])


def choose_nodes(
    tokens: torch.Tensor, chances: torch.Tensor, count: int, fixed: Sequence[int], branches: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Choose the tokens of a level that are read next: tokens, chances, indices in the level, and for each the index of
    its parent among the nodes of the previous level, ``[B, count]``.

    Args:
        tokens: int64 ``[B, n]``; chances: float32 ``[B, n]``.
        fixed: the indices; empty: the likeliest, of equal ones the first.
        branches: children of each node.
    """
    if fixed:
        index = numbers(fixed, tokens.device).expand(tokens.shape[0], -1)
    else:
        index = _by_chance(chances)[:, :count]
    # In place of an absent token (-1), token 0 is read; its children have the chance 0, and are not proposed.
    return tokens.gather(1, index).clamp(min=0), chances.gather(1, index), index.contiguous(), index // branches


def with_nodes(
    tokens: torch.Tensor,
    came_from: torch.Tensor,
    read_tokens: torch.Tensor | None = None,
    read_parents: torch.Tensor | None = None,
    begin: int = -1,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and parents ``[B, n + m]`` of what was read, ``[B, n]`` each, and of a new level, ``[B, m]``.

    Args:
        begin: the index of the first node of the level before; -1 for the first level, which has no parents.
    """
    parents = torch.full_like(came_from, -1) if begin < 0 else came_from + begin
    if read_tokens is None or read_parents is None:
        return tokens.clone(), parents
    return torch.cat([read_tokens, tokens], 1), torch.cat([read_parents, parents], 1)


def first_place(length: torch.Tensor, slots: torch.Tensor, ahead: int, most: int) -> torch.Tensor:
    """The position ``[B]`` of the first node's row and of its KV. It is at most ``most``, which sequences without space
    for a tree exceed.

    Args:
        length: int64 ``[N]``; slots: int64 ``[B]``.
        ahead: after a sequence of L tokens, the row of a tree's first token has position ``L - ahead``.
    """
    return (length[slots] - ahead).clamp(min=0, max=most)


def positions_of_nodes(first: torch.Tensor, levels: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """The rotary positions and the KV's positions ``[B, n]`` of nodes of these levels, from 1, where the first node has
    the position ``first``, int64 ``[B]``."""
    depths = torch.cat([torch.full((1,), level - 1, device=first.device) for level in levels])
    return first[:, None] + depths, first[:, None] + torch.arange(len(levels), device=first.device)


def _longest(length: torch.Tensor, limit: torch.Tensor, slots: torch.Tensor, max_len: int) -> torch.Tensor:
    """The number of drafts ``[B]`` that a step could emit, see :func:`likeliest_tree`."""
    row_length = length[slots]
    longest = (max_len - 1 - row_length).clamp(min=0)
    return torch.minimum(longest, limit[slots] - row_length - 1).clamp(min=0)


def within_reach(
    length: torch.Tensor, limit: torch.Tensor, slots: torch.Tensor, depths: Sequence[int], max_len: int
) -> torch.Tensor:
    """Whether a step could emit tokens of these ``depths``, bool ``[B, n]``; see :func:`likeliest_tree`."""
    runs = [torch.full((len(list(run)),), depth, device=length.device) for depth, run in groupby(depths)]
    return torch.cat(runs) <= _longest(length, limit, slots, max_len)[:, None]


def likeliest_tree(
    tokens: torch.Tensor,
    chances: torch.Tensor,
    parents: torch.Tensor,
    length: torch.Tensor,
    limit: torch.Tensor,
    slots: torch.Tensor,
    depths: Sequence[int],
    max_len: int,
    nodes: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The likeliest tokens of all levels and their parents ``[B, min(n, nodes)]``, and their number ``[B]``.

    Args:
        tokens, chances, parents: ``[B, n]``, of :func:`next_level`, all levels.
        length, limit: int64 ``[N]``; slots: int64 ``[B]``.
        depths: of each token. Tokens that a step could not emit are left out.
        max_len: the drafter's longest sequence.
    """
    longest = _longest(length, limit, slots, max_len)
    inside = within_reach(length, limit, slots, depths, max_len)
    found, parents = ranked(torch.where(inside & (chances > -inf), tokens, -1), chances, parents, nodes)
    return found, parents, torch.where(longest > 0, found.shape[1], 0)


def _define(schema: str, fake: Callable[..., Any] | None, reference: Callable[..., Any]) -> None:
    define(reference.__name__ + schema, fake, reference, cpp=BASE, recorded=True)


def _next_level_fake(tokens, logprobs, *rest, **options):  # type: ignore[no-untyped-def]
    size = (tokens.shape[0], tokens.shape[1] * tokens.shape[2])
    return tokens.new_empty(size), logprobs.new_empty(size), tokens.new_empty(size)


def _choose_nodes_fake(tokens, chances, count, fixed, branches):  # type: ignore[no-untyped-def]
    size = (tokens.shape[0], count)
    return tokens.new_empty(size), chances.new_empty(size), tokens.new_empty(size), tokens.new_empty(size)


def _with_nodes_fake(tokens, came_from, read_tokens=None, *rest, **options):  # type: ignore[no-untyped-def]
    before = 0 if read_tokens is None else read_tokens.shape[1]
    size = (tokens.shape[0], before + tokens.shape[1])
    return tokens.new_empty(size), tokens.new_empty(size)


def _likeliest_tree_fake(tokens, chances, parents, length, limit, slots, depths, max_len, nodes):  # type: ignore[no-untyped-def]
    size = (tokens.shape[0], min(tokens.shape[1], nodes))
    return tokens.new_empty(size), tokens.new_empty(size), tokens.new_empty(tokens.shape[:1])


_define(
    "(Tensor tokens, Tensor logprobs, Tensor? chances=None, Tensor? index=None, int first=0) "
    "-> (Tensor, Tensor, Tensor)",
    _next_level_fake,
    next_level,
)
_define("(Tensor tokens, Tensor ids) -> Tensor", lambda tokens, ids: tokens.new_empty(tokens.shape), as_target_ids)
_define(
    "(Tensor tokens, Tensor chances, int count, int[] fixed, int branches) -> (Tensor, Tensor, Tensor, Tensor)",
    _choose_nodes_fake,
    choose_nodes,
)
_define(
    "(Tensor tokens, Tensor came_from, Tensor? read_tokens=None, Tensor? read_parents=None, int begin=-1) "
    "-> (Tensor, Tensor)",
    _with_nodes_fake,
    with_nodes,
)
_define(
    "(Tensor length, Tensor slots, int ahead, int most) -> Tensor",
    lambda length, slots, ahead, most: slots.new_empty(slots.shape),
    first_place,
)
_define(
    "(Tensor first, int[] levels) -> (Tensor, Tensor)",
    lambda first, levels: tuple(first.new_empty((first.shape[0], len(levels))) for _ in range(2)),
    positions_of_nodes,
)
_define(
    "(Tensor tokens, Tensor chances, Tensor parents, Tensor length, Tensor limit, Tensor slots, int[] depths, "
    "int max_len, int nodes) -> (Tensor, Tensor, Tensor)",
    _likeliest_tree_fake,
    likeliest_tree,
)

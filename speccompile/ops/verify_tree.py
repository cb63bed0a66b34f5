"""Inputs and outcome of the target in a step of trees, as ops in C++ on a CPU.

The C++ is ``ops/cpu/csrc/base/ops/verify_tree_ops.cpp``. Passes insert what
:func:`speccompile.ops.draft_rows.form_of` returns for these functions. Nodes are numbered as in ``ops/tree.py``.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from speccompile.ops.cpu.library import BASE
from speccompile.ops.define import define
from speccompile.ops.step_inputs import newest_and_drafts


def newest_and_nodes(
    tokens: torch.Tensor,
    length: torch.Tensor,
    slots: torch.Tensor,
    drafts: torch.Tensor,
    depths: torch.Tensor,
    vocab_size: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Tokens, positions and places of the KV ``[B, T]`` of a verify step, and the root's place ``[B]``.

    Args:
        tokens: int64 ``[N, S]``; length: int64 ``[N]``; slots: int64 ``[B]``; drafts: int64 ``[B, T - 1]``, -1 for
            none; depths: int64 ``[B, T]``.
    """
    width = depths.shape[1]
    read, places = newest_and_drafts(tokens, length, slots, drafts, width=width, vocab_size=vocab_size)
    root = places[:, 0]
    return read, root[:, None] + depths, places, root


def tokens_on_path(target: torch.Tensor, path: torch.Tensor) -> torch.Tensor:
    """The target's tokens after the nodes ``path``, int64 ``[B, D]``.

    Args:
        target: int64 ``[B, T]``, the target's token after each node; path: int64 ``[B, D]``.
    """
    return target.gather(1, path)


def rows_on_path(values: torch.Tensor, path: torch.Tensor) -> torch.Tensor:
    """``[B, D, ...]`` of ``values`` ``[B, T, ...]`` of any dtype, at the nodes ``path``, int64 ``[B, D]``."""
    return values[torch.arange(values.shape[0], device=values.device)[:, None], path]


def chain_in_tree(
    drafts: torch.Tensor, parents: torch.Tensor, path: torch.Tensor, accepted: torch.Tensor, *, others: Sequence[int]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Numbers of the chain's drafts that are accepted and that were judged: one more where the tree has the next.

    Args:
        drafts: ``[B, nodes]``, -1 for no draft; parents: ``[B, 1 + nodes]``. Of siblings the first in number is the
            likeliest.
        path: ``[B, 1 + depth]``, accepted: ``[B]``, of :func:`speccompile.ops.tree.walk_tree`.
        others: nodes, from 1 on, that are not the first branch of their parent even if they are its first child.

    Returns:
        Two of int64 ``[B]``.
    """
    of = parents[:, 1:]
    there = drafts >= 0
    # [B, node, earlier node]
    siblings = (of[:, :, None] == of[:, None, :]) & there[:, None, :]
    first = there & ~siblings.tril(-1).any(2)
    for node in others:
        first[:, node - 1].fill_(False)
    offsets = torch.arange(1, path.shape[1], device=path.device)
    on_chain = first.gather(1, (path[:, 1:] - 1).clamp(min=0)) & (offsets <= accepted[:, None])
    count = on_chain.long().cumprod(1).sum(1)
    end = path.gather(1, count[:, None])
    return count, count + (first & (of == end)).any(1)


def deepest_draft(drafts: torch.Tensor, depths: torch.Tensor) -> torch.Tensor:
    """The greatest depth of a node that has a draft, int64 ``[B]``; 0 where none has.

    Args:
        drafts: ``[B, nodes]``, -1 for no draft; depths: ``[B, 1 + nodes]``.
    """
    return torch.where(drafts >= 0, depths[:, 1:], 0).amax(1)


def judge_chain_(
    drafts: torch.Tensor,
    parents: torch.Tensor,
    depths: torch.Tensor,
    path: torch.Tensor,
    accepted: torch.Tensor,
    slots: torch.Tensor,
    chain_accepted: torch.Tensor,
    chain_judged: torch.Tensor,
    deepest: torch.Tensor,
    others: Sequence[int],
) -> None:
    """Write what :func:`chain_in_tree` and :func:`deepest_draft` find to the rows' slots in state.

    Args:
        drafts, parents, path, accepted, others: of :func:`chain_in_tree`, int64.
        depths: int64 ``[B, 1 + nodes]``; slots: int64 ``[B]``.
        chain_accepted, chain_judged, deepest: int64 ``[N]``.
    """
    found = chain_in_tree(drafts, parents, path, accepted, others=others)
    values = (*found, deepest_draft(drafts, depths))
    for kept, value in zip((chain_accepted, chain_judged, deepest), values, strict=True):
        kept.index_put_((slots,), value)


def _separate_nodes(*given):  # type: ignore[no-untyped-def]
    """Return what :func:`newest_and_nodes` does, with no result a view of another, as an op must."""
    *others, root = newest_and_nodes(*given)
    return (*others, root.clone())


def _nodes_fake(tokens, length, slots, drafts, depths, vocab_size):  # type: ignore[no-untyped-def]
    return (*(tokens.new_empty(depths.shape) for _ in range(3)), tokens.new_empty((slots.shape[0],)))


define(
    "newest_and_nodes(Tensor tokens, Tensor length, Tensor slots, Tensor drafts, Tensor depths, int vocab_size) "
    "-> (Tensor, Tensor, Tensor, Tensor)",
    _nodes_fake,
    _separate_nodes,
    cpp=BASE,
    recorded=True,
)
define(
    "tokens_on_path(Tensor target, Tensor path) -> Tensor",
    lambda target, path: target.new_empty(path.shape),
    tokens_on_path,
    cpp=BASE,
    recorded=True,
)
define(
    "rows_on_path(Tensor values, Tensor path) -> Tensor",
    lambda values, path: values.new_empty((*path.shape, *values.shape[2:])),
    rows_on_path,
    cpp=BASE,
    recorded=True,
)
define(
    "judge_chain_(Tensor drafts, Tensor parents, Tensor depths, Tensor path, Tensor accepted, Tensor slots, "
    "Tensor(a!) chain_accepted, Tensor(b!) chain_judged, Tensor(c!) deepest, int[] others) -> ()",
    None,
    judge_chain_,
    cpp=BASE,
    recorded=True,
)

"""Trees of drafts that pass through state, as ops in C++ on a CPU.

The C++ is ``ops/cpu/csrc/base/ops/stored_tree_ops.cpp``. Passes insert what :func:`speccompile.ops.draft_rows.form_of`
returns for these functions.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn.functional import pad

from speccompile.ops.cpu.library import BASE
from speccompile.ops.define import define


def store_proposed_tree_(
    tree_tokens: torch.Tensor,
    tree_parents: torch.Tensor,
    tree_count: torch.Tensor,
    slots: torch.Tensor,
    tokens: torch.Tensor,
    parents: torch.Tensor,
    count: torch.Tensor,
) -> None:
    """Write proposed trees into state: tokens and parents, int64 ``[B, P]``, and their number ``[B]``, from 0 to P.

    Args:
        tree_tokens, tree_parents: int64 ``[N, P]``; tree_count: int64 ``[N]``; slots: int64 ``[B]``.
    """
    tree_tokens.index_put_((slots,), tokens)
    tree_parents.index_put_((slots,), parents)
    tree_count.index_put_((slots,), count.clamp(min=0, max=tokens.shape[1]))


def store_tree_(
    stored_drafts: torch.Tensor,
    stored_parents: torch.Tensor,
    stored_depths: torch.Tensor,
    stored_lens: torch.Tensor,
    slots: torch.Tensor,
    drafts: torch.Tensor,
    parents: torch.Tensor,
    depths: torch.Tensor,
    lens: torch.Tensor,
) -> None:
    """Write trees in the form of a tier into state, without their roots. The rest of the state is filled with empty
    children of the root (-1): a tier of any width reads a valid tree.

    Args:
        stored_drafts, stored_parents, stored_depths: int64 ``[N, Kmax]``; stored_lens: int64 ``[N]``; slots: int64
            ``[B]``.
        drafts: int64 ``[B, nodes]``; parents, depths: int64 ``[B, 1 + nodes]``; lens: int64 ``[B]``.
    """
    rest = (0, stored_drafts.shape[1] - drafts.shape[1])
    stored_drafts.index_put_((slots,), pad(drafts, rest, value=-1))
    stored_parents.index_put_((slots,), pad(parents[:, 1:], rest))
    stored_depths.index_put_((slots,), pad(depths[:, 1:], rest, value=1))
    stored_lens.index_put_((slots,), lens)


def stored_tree(
    stored_drafts: torch.Tensor,
    stored_parents: torch.Tensor,
    stored_depths: torch.Tensor,
    stored_lens: torch.Tensor,
    slots: torch.Tensor,
    nodes: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Drafts ``[B, nodes]``, parents and depths ``[B, 1 + nodes]``, and lengths ``[B]`` that :func:`store_tree_` has
    written, their roots added."""
    kept = (part[slots, :nodes] for part in (stored_drafts, stored_parents, stored_depths))
    drafts, parents, depths = kept
    root = torch.zeros_like(slots)[:, None]
    return drafts, torch.cat([root - 1, parents], 1), torch.cat([root, depths], 1), stored_lens[slots]


def chain_parents(lens: torch.Tensor, width: int) -> torch.Tensor:
    """The parents ``[B, width]`` of chains as trees of one branch, one for each of ``lens`` ``[B]``."""
    return torch.arange(width, device=lens.device).expand(lens.shape[0], -1).contiguous()


def proposed_or_stored_tree(
    draft_lens: torch.Tensor,
    slots: torch.Tensor,
    drafts: torch.Tensor,
    parents: torch.Tensor,
    depths: torch.Tensor,
    lens: torch.Tensor,
    other_drafts: torch.Tensor,
    other_parents: torch.Tensor,
    other_depths: torch.Tensor,
    other_lens: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """A row's proposal, in the form of a tier; or the other tree, which is stored, where it has none.

    Args:
        draft_lens: int64 ``[N]``, the lengths of proposals; slots: int64 ``[B]``.
        drafts, parents, depths, lens: as :func:`stored_tree` returns them; so are the other ones.
    """
    # Where neither has drafted, as in rows that hold no request, what is stored may be no tree.
    other = ((draft_lens[slots] == 0) & (other_lens > 0))[:, None]
    return (
        torch.where(other, other_drafts, drafts),
        torch.where(other, other_parents, parents),
        torch.where(other, other_depths, depths),
        torch.where(other[:, 0], other_lens, lens),
    )


def _define(schema: str, fake: Callable[..., Any] | None, reference: Callable[..., Any]) -> None:
    define(reference.__name__ + schema, fake, reference, cpp=BASE, recorded=True)


def _trees(like: torch.Tensor, rows: int, nodes: int) -> tuple[torch.Tensor, ...]:
    return tuple(like.new_empty(size) for size in ((rows, nodes), (rows, nodes + 1), (rows, nodes + 1), (rows,)))


_define(
    "(Tensor(a!) tree_tokens, Tensor(b!) tree_parents, Tensor(c!) tree_count, Tensor slots, Tensor tokens, "
    "Tensor parents, Tensor count) -> ()",
    None,
    store_proposed_tree_,
)
_define(
    "(Tensor(a!) stored_drafts, Tensor(b!) stored_parents, Tensor(c!) stored_depths, Tensor(d!) stored_lens, "
    "Tensor slots, Tensor drafts, Tensor parents, Tensor depths, Tensor lens) -> ()",
    None,
    store_tree_,
)
_define(
    "(Tensor stored_drafts, Tensor stored_parents, Tensor stored_depths, Tensor stored_lens, Tensor slots, int nodes) "
    "-> (Tensor, Tensor, Tensor, Tensor)",
    lambda drafts, parents, depths, lens, slots, nodes: _trees(drafts, slots.shape[0], nodes),
    stored_tree,
)
_define(
    "(Tensor lens, int width) -> Tensor",
    lambda lens, width: lens.new_empty((lens.shape[0], width)),
    chain_parents,
)
_define(
    "(Tensor draft_lens, Tensor slots, Tensor drafts, Tensor parents, Tensor depths, Tensor lens, "
    "Tensor other_drafts, Tensor other_parents, Tensor other_depths, Tensor other_lens) "
    "-> (Tensor, Tensor, Tensor, Tensor)",
    lambda draft_lens, slots, drafts, *rest: _trees(drafts, *drafts.shape),
    proposed_or_stored_tree,
)

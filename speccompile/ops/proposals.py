"""Choice among the proposals of several drafters, as ops in C++ on a CPU.

The C++ is ``ops/cpu/csrc/base/ops/proposal_ops.cpp``. Passes insert what :func:`speccompile.ops.draft_rows.form_of`
returns for these functions.
"""

from __future__ import annotations

import torch

from speccompile.ops.cpu.library import BASE
from speccompile.ops.define import define


def take_passing(
    drafts: torch.Tensor,
    lens: torch.Tensor,
    scores: torch.Tensor | None,
    other_drafts: torch.Tensor | None,
    other_lens: torch.Tensor | None,
    other_scores: torch.Tensor | None,
    other_by: torch.Tensor | None,
    by: int,
    least: float,
    always: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """A drafter's proposals where they pass, else the other ones.

    A proposal passes if it is not empty, and the sum of its scores is at least ``least``.

    Args:
        drafts: int64 ``[B, K]``; lens: int64 ``[B]``; scores: float32 ``[B, K]``, cumulative probabilities, or None:
            the drafter has no scores, and counts as certain.
        other_drafts, other_lens, other_scores, other_by: results of this function for the drafters after it; None: the
            other proposals are empty.
        by: the drafter's index.
        always: proposals pass with any score.

    Returns:
        Drafts, lengths, scores, and the index of each row's drafter, int64 ``[B]``; ``by + 1`` if no drafter's passes.
    """
    own = torch.ones_like(drafts, dtype=torch.float32) if scores is None else scores
    passes = torch.ones_like(lens, dtype=torch.bool) if always else lens > 0
    if scores is not None and not always:
        inside = torch.arange(drafts.shape[1], device=drafts.device) < lens[:, None]
        passes = passes & (torch.where(inside, own.double(), 0.0).sum(1) >= least)
    if other_drafts is None or other_lens is None or other_scores is None or other_by is None:
        return drafts.clone(), torch.where(passes, lens, 0), own.clone(), torch.where(passes, by, by + 1)
    return (
        torch.where(passes[:, None], drafts, other_drafts),
        torch.where(passes, lens, other_lens),
        torch.where(passes[:, None], own, other_scores),
        torch.where(passes, by, other_by),
    )


def proposed_or_stored(
    draft_tokens: torch.Tensor,
    draft_lens: torch.Tensor,
    stored_drafts: torch.Tensor,
    stored_lens: torch.Tensor,
    length: torch.Tensor,
    limit: torch.Tensor,
    slots: torch.Tensor,
    draft_len: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Each row's proposal where it has one, else its stored drafts: ``[B, K]``, -1 after a row's own draft length, and
    these lengths ``[B]``.

    Args:
        draft_tokens, stored_drafts: int64 ``[N, Kmax]``; draft_lens, stored_lens, length, limit: int64 ``[N]``; slots:
            int64 ``[B]``.
    """
    proposed = draft_lens[slots] > 0
    drafts = torch.where(proposed[:, None], draft_tokens[slots, :draft_len], stored_drafts[slots, :draft_len])
    lens = torch.where(proposed, draft_lens[slots], stored_lens[slots]).clamp(max=draft_len)
    lens = torch.minimum(lens, (limit[slots] - length[slots] - 1).clamp(min=0))
    inside = torch.arange(draft_len, device=slots.device) < lens[:, None]
    return torch.where(inside, drafts, -1), lens


def store_rows_(kept: torch.Tensor, slots: torch.Tensor, values: torch.Tensor) -> None:
    """Write the rows' ``values`` ``[B, ...]`` to their slots in ``kept`` ``[N, ...]``.

    Args:
        slots: int64 ``[B]``.
    """
    kept.index_put_((slots,), values)


define(
    "take_passing(Tensor drafts, Tensor lens, Tensor? scores, Tensor? other_drafts, Tensor? other_lens, "
    "Tensor? other_scores, Tensor? other_by, int by, float least, bool always) -> (Tensor, Tensor, Tensor, Tensor)",
    lambda drafts, lens, *rest: (
        drafts.new_empty(drafts.shape),
        lens.new_empty(lens.shape),
        drafts.new_empty(drafts.shape, dtype=torch.float32),
        lens.new_empty(lens.shape),
    ),
    take_passing,
    cpp=BASE,
    recorded=True,
)
define(
    "proposed_or_stored(Tensor draft_tokens, Tensor draft_lens, Tensor stored_drafts, Tensor stored_lens, "
    "Tensor length, Tensor limit, Tensor slots, int draft_len) -> (Tensor, Tensor)",
    lambda draft_tokens, draft_lens, stored_drafts, stored_lens, length, limit, slots, draft_len: (
        slots.new_empty((slots.shape[0], draft_len)),
        slots.new_empty((slots.shape[0],)),
    ),
    proposed_or_stored,
    cpp=BASE,
    recorded=True,
)
define("store_rows_(Tensor(a!) kept, Tensor slots, Tensor values) -> ()", None, store_rows_, cpp=BASE, recorded=True)

"""Proposals of a step's rows written to their slots in one kernel."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from speccompile.ops.triton.attention_plan import power_of_2
from speccompile.ops.triton.launch import Launch, run_all


@triton.jit
def store_drafts_rows(  # type: ignore[no-untyped-def]
    draft_tokens,
    draft_lens,
    length,
    limit,
    slots,
    drafts,
    lens,
    longest,
    PADDED_DRAFTS: tl.constexpr,
):
    """Program (row)."""
    row = tl.program_id(0)
    slot = tl.load(slots + row)
    place = tl.arange(0, PADDED_DRAFTS)
    draft = tl.load(drafts + row * longest + place, mask=place < longest, other=0)
    tl.store(draft_tokens + slot * longest + place, draft, mask=place < longest)
    useful = tl.load(limit + slot) - tl.load(length + slot) - 1
    count = tl.minimum(tl.load(lens + row), longest)
    tl.store(draft_lens + slot, tl.maximum(tl.minimum(count, useful), 0))


def store_drafts_launch(
    draft_tokens: torch.Tensor,
    draft_lens: torch.Tensor,
    length: torch.Tensor,
    limit: torch.Tensor,
    slots: torch.Tensor,
    drafts: torch.Tensor,
    lens: torch.Tensor,
) -> Launch:
    """The launch; all tensors are contiguous."""
    arguments = {
        "draft_tokens": draft_tokens,
        "draft_lens": draft_lens,
        "length": length,
        "limit": limit,
        "slots": slots,
        "drafts": drafts,
        "lens": lens,
        "longest": drafts.shape[1],
        "PADDED_DRAFTS": power_of_2(drafts.shape[1]),
    }
    return Launch(store_drafts_rows, (len(slots),), arguments, warps=1)


def store_drafts(
    draft_tokens: torch.Tensor,
    draft_lens: torch.Tensor,
    length: torch.Tensor,
    limit: torch.Tensor,
    slots: torch.Tensor,
    drafts: torch.Tensor,
    lens: torch.Tensor,
) -> None:
    """``speccompile::store_drafts_`` on CUDA; arguments as the op's ``reference`` has them."""
    # State lies in the arena; of what a step computed the layout is not known.
    own = drafts.contiguous(), lens.contiguous()
    run_all([store_drafts_launch(draft_tokens, draft_lens, length, limit, slots, *own)], draft_tokens)

"""Drafts of a step, and tokens and positions that its target reads, in one kernel."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from speccompile.ops.triton.attention_plan import power_of_2
from speccompile.ops.triton.launch import Launch, run_all


@triton.jit
def step_inputs_rows(  # type: ignore[no-untyped-def]
    tokens,
    length,
    slots,
    drafts,
    draft_lens,
    limit,
    draft_limit,
    own,
    lens,
    read,
    positions,
    token_slot,
    draft_slot,
    drafted,
    width,
    vocab_size,
    PADDED_WIDTH: tl.constexpr,
):
    """Program (row)."""
    row = tl.program_id(0)
    slot = tl.load(slots + row)
    row_length = tl.load(length + slot)
    newest_at = tl.maximum(row_length - 1, 0)
    newest = tl.load(tokens + slot * token_slot + newest_at)
    place = tl.arange(0, PADDED_WIDTH)
    is_draft = place < drafted
    # No drafts, unless there are some.
    count = slot * 0
    draft = place.to(tl.int64) * 0 - 1
    if drafts is not None:
        if limit is not None:
            count = tl.minimum(tl.load(draft_lens + slot), drafted)
            count = tl.maximum(tl.minimum(count, tl.load(limit + slot) - row_length - 1), 0)
            draft = tl.load(drafts + slot * draft_slot + place, mask=is_draft, other=-1)
        else:
            count = tl.load(draft_lens + row)
            draft = tl.load(drafts + row * draft_slot + place, mask=is_draft, other=-1)
    if draft_limit is not None:
        count = tl.minimum(count, tl.load(draft_limit + slot))
    draft = tl.where(place < count, draft, -1)
    tl.store(own + row * drafted + place, draft, mask=is_draft)
    tl.store(lens + row, count)

    token = tl.where((draft < 0) | (draft >= vocab_size), newest, draft)
    tl.store(read + row * width, newest)
    tl.store(read + row * width + 1 + place, token, mask=place < width - 1)
    tl.store(positions + row * width + place, newest_at + place, mask=place < width)


def step_inputs_launch(
    tokens: torch.Tensor,
    length: torch.Tensor,
    slots: torch.Tensor,
    drafts: torch.Tensor | None,
    draft_lens: torch.Tensor | None,
    limit: torch.Tensor | None,
    draft_limit: torch.Tensor | None,
    width: int,
    vocab_size: int,
    results: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor],
) -> Launch:
    """The launch; arguments as of :func:`step_inputs`, ``results`` as that returns them."""
    own, lens, read, positions = results
    arguments = {
        "tokens": tokens,
        "length": length,
        "slots": slots,
        "drafts": drafts,
        "draft_lens": draft_lens,
        "limit": limit,
        "draft_limit": draft_limit,
        "own": own,
        "lens": lens,
        "read": read,
        "positions": positions,
        "token_slot": tokens.stride(0),
        "draft_slot": 0 if drafts is None else drafts.stride(0),
        "drafted": own.shape[1],
        "width": width,
        "vocab_size": vocab_size,
        "PADDED_WIDTH": power_of_2(width),
    }
    return Launch(step_inputs_rows, (len(slots),), arguments, warps=1)


def step_inputs(
    tokens: torch.Tensor,
    length: torch.Tensor,
    slots: torch.Tensor,
    drafts: torch.Tensor | None,
    draft_lens: torch.Tensor | None,
    limit: torch.Tensor | None,
    draft_limit: torch.Tensor | None,
    draft_len: int,
    width: int,
    vocab_size: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """``speccompile::step_inputs`` on CUDA; arguments and results as the op's ``reference`` has them."""
    rows = len(slots)
    results = (
        tokens.new_empty((rows, draft_len)),
        tokens.new_empty(rows),
        tokens.new_empty((rows, width)),
        tokens.new_empty((rows, width)),
    )
    # Of what a step computed the layout is not known.
    drafts, draft_lens = (None if item is None else item.contiguous() for item in (drafts, draft_lens))
    given = (tokens, length, slots, drafts, draft_lens, limit, draft_limit)
    run_all([step_inputs_launch(*given, width, vocab_size, results)], tokens)
    return results

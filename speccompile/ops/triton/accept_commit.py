"""Acceptance and commit of a step in one kernel: ``greedy_accept`` (from its target tokens on), then ``commit``."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import triton
import triton.language as tl

from speccompile.ops.triton.attention_plan import power_of_2
from speccompile.ops.triton.launch import Launch, run_all


@triton.jit
def accept_commit_rows(  # type: ignore[no-untyped-def]
    tokens,
    length,
    limit,
    alive,
    eos,
    emitted,
    accepted,
    proposed,
    slots,
    target_tokens,
    row_draft_lens,
    row_accepted,
    drafts,
    ready,
    token_slot,
    drafted,
    ends,
    PADDED_WIDTH: tl.constexpr,
    PADDED_ENDS: tl.constexpr,
):
    """Program (row)."""
    row = tl.program_id(0)
    slot = tl.load(slots + row)
    row_length = tl.load(length + slot)
    row_limit = tl.load(limit + slot)
    row_alive = tl.load(alive + slot)
    offered = tl.load(row_draft_lens + row)
    acts = row_alive
    if ready is not None:
        acts = acts & tl.load(ready + row)

    width = drafted + 1
    place = tl.arange(0, PADDED_WIDTH)
    target = tl.load(target_tokens + row * width + place, mask=place < width, other=0)
    if row_accepted is not None:
        right = tl.load(row_accepted + row)
    else:
        draft = tl.load(drafts + row * drafted + place, mask=place < drafted, other=0)
        agrees = (draft == target) & (place < drafted) & (place < offered)
        # The first place that does not agree is how many before it do; after the drafts none does.
        right = tl.min(tl.where(agrees, PADDED_WIDTH, place)).to(tl.int64)

    count = tl.minimum(right + 1, row_limit - row_length)
    end = tl.arange(0, PADDED_ENDS)
    ids = tl.load(eos + slot * ends + end, mask=end < ends, other=-2)
    is_end = tl.max(((target[:, None] == ids[None, :]) & (end < ends)[None, :]).to(tl.int32), 1) > 0
    first_end = tl.min(tl.where(is_end & (place < count) & (place < width), place, width)).to(tl.int64)
    count = tl.minimum(count, first_end + 1)
    first_undecided = tl.min(tl.where((target < 0) & (place < width), place, width)).to(tl.int64)
    undecided = (first_undecided < count) & (offered == 0)
    count = tl.where(acts, tl.minimum(count, first_undecided), 0)

    tl.store(tokens + slot * token_slot + row_length + place, target, mask=(place < count) & (place < width))
    new_length = row_length + count
    ended = acts & ((first_end < count) | (new_length >= row_limit) | undecided)
    tl.store(length + slot, new_length)
    tl.store(alive + slot, row_alive & (ended == 0))
    tl.store(emitted + slot, count)
    tl.store(accepted + slot, tl.minimum(right, count))
    tl.store(proposed + slot, tl.where(acts, offered, 0))


def accept_commit_launch(tensors: Mapping[str, torch.Tensor | None]) -> Launch:
    """One launch over tensors by the names of the op (``speccompile.ops.commit.NAMES``).

    All are contiguous, but for the rows of ``tokens``.
    """
    tokens, eos, target_tokens = (_there(tensors[name]) for name in ("tokens", "eos", "target_tokens"))
    rows, width = target_tokens.shape
    return Launch(
        accept_commit_rows,
        (rows,),
        {
            **tensors,
            "token_slot": tokens.stride(0),
            "drafted": width - 1,
            "ends": eos.shape[1],
            "PADDED_WIDTH": power_of_2(width),
            "PADDED_ENDS": power_of_2(eos.shape[1]),
        },
        warps=1,
    )


def accept_commit(tensors: Mapping[str, torch.Tensor | None]) -> None:
    """``speccompile::accept_commit_`` on CUDA."""
    state = ("tokens", "length", "limit", "alive", "eos", "emitted", "accepted", "proposed")
    # State lies in the arena; of what a step computed the layout is not known.
    ready = {name: value if value is None or name in state else value.contiguous() for name, value in tensors.items()}
    run_all([accept_commit_launch(ready)], _there(tensors["tokens"]))


def _there(tensor: torch.Tensor | None) -> torch.Tensor:
    assert tensor is not None
    return tensor

"""The second attention kernel: the partial results of a query become its result."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from speccompile.ops.triton.attention_call import AttentionCall
from speccompile.ops.triton.attention_plan import AttentionPlan, power_of_2
from speccompile.ops.triton.attention_visible import NOTHING, first_seen
from speccompile.ops.triton.launch import Launch

# Values of one query that a program combines.
SLICE = 64


@triton.jit(do_not_specialize=["width"])
def combine_attention(  # type: ignore[no-untyped-def]
    workspace,
    out,
    positions,
    parents,
    sinks,
    width,
    splits,
    HEADS: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    SLICE: tl.constexpr,
    WINDOW: tl.constexpr,
    CHUNK: tl.constexpr,
    SPAN: tl.constexpr,
    PADDED_SPLITS: tl.constexpr,
):
    """Program (place * HEADS + head, slice of the values, row): the weighted sum of one query's partial results.

    A split has ``SPAN`` keys. Splits that were not computed for this query have the weight 0 and are not loaded:
    neither their number nor the contents of their part of the workspace matters.
    """
    query = tl.program_id(0)
    place = query // HEADS
    row = tl.program_id(2).to(tl.int64)
    positions += row * width
    own = tl.load(positions + place).to(tl.int32)
    first = first_seen(own, WINDOW, CHUNK)
    last = own
    if parents is not None:
        root = tl.load(positions).to(tl.int32)
        first = tl.minimum(first, root)
        last = root + width - 1
    split = tl.arange(0, PADDED_SPLITS)
    live = (split >= first // SPAN) & (split <= last // SPAN) & (split < splits)

    all_queries = tl.num_programs(2).to(tl.int64) * splits * width * HEADS
    at = (row * splits + split) * width * HEADS + query
    top = tl.load(workspace + all_queries * VALUE_DIM + at, mask=live, other=NOTHING)
    total = tl.load(workspace + all_queries * (VALUE_DIM + 1) + at, mask=live, other=0.0)
    highest = tl.max(top)
    if sinks is not None:
        sink = tl.load(sinks + query % HEADS).to(tl.float32) * 1.4426950408889634  # log2(e)
        highest = tl.maximum(highest, sink)
    weight = tl.exp2(top - highest)
    everything = tl.sum(total * weight)
    if sinks is not None:
        everything += tl.exp2(sink - highest)

    value = tl.program_id(1) * SLICE + tl.arange(0, SLICE)
    kept = value < VALUE_DIM
    part = tl.load(workspace + at[:, None] * VALUE_DIM + value[None, :], mask=live[:, None] & kept[None, :], other=0.0)
    result = tl.sum(part * weight[:, None], 0) / everything
    out += (row * width * HEADS + query) * VALUE_DIM + value
    tl.store(out, result.to(out.dtype.element_ty), mask=kept)


def combine_launch(call: AttentionCall, out: torch.Tensor, workspace: torch.Tensor, plan: AttentionPlan) -> Launch:
    """Writes ``out`` ``[B, T, H, Dv]``, contiguous, from what the first kernel left in ``workspace``."""
    rows, width, heads, _, _, value_dim, _ = call.sizes
    return Launch(
        combine_attention,
        (width * heads, -(-value_dim // SLICE), rows),
        {
            **call.for_both(),
            "workspace": workspace,
            "splits": plan.splits,
            "out": out,
            "sinks": call.sinks,
            "HEADS": heads,
            "VALUE_DIM": value_dim,
            "SLICE": min(SLICE, power_of_2(value_dim)),
            "SPAN": plan.keys * plan.blocks,
            "PADDED_SPLITS": power_of_2(plan.splits),
        },
    )

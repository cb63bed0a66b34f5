"""The n-gram match of ``speccompile.modes.ngram``, which reads only the live part of each row's sequence."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from speccompile.ops.triton.attention_plan import power_of_2
from speccompile.ops.triton.launch import Launch, run_all

# Places that a program reads.
SPAN = 1024


@triton.jit
def match_partial(  # type: ignore[no-untyped-def]
    tokens,
    length,
    slots,
    keys,
    token_slot,
    capacity,
    MAX_NGRAM: tl.constexpr,
    MIN_NGRAM: tl.constexpr,
    SPAN: tl.constexpr,
):
    """Program (span, row): the greatest key, ``matched * capacity + place``, of the places in its span; 0 for none."""
    span, row = tl.program_id(0), tl.program_id(1)
    slot = tl.load(slots + row)
    newest = tl.load(length + slot) - 1
    if span * SPAN >= newest:
        return
    tokens += slot * token_slot
    place = span * SPAN + tl.arange(0, SPAN)
    equal = place < newest
    matched = tl.zeros((SPAN,), tl.int64)
    for back in tl.static_range(MAX_NGRAM):
        token = tl.load(tokens + tl.maximum(newest - back, 0))
        there = tl.load(tokens + place - back, mask=equal & (place >= back), other=-1)
        equal = equal & (place >= back) & (there == token)
        matched += equal.to(tl.int64)
    key = tl.where(matched >= MIN_NGRAM, matched * capacity + place, 0)
    tl.store(keys + row * tl.num_programs(0) + span, tl.max(key))


@triton.jit
def match_combine(  # type: ignore[no-untyped-def]
    tokens,
    length,
    slots,
    keys,
    drafts,
    lens,
    token_slot,
    capacity,
    spans,
    drafted,
    SPAN: tl.constexpr,
    PADDED_SPANS: tl.constexpr,
    PADDED_DRAFTS: tl.constexpr,
):
    """Program (row): the best match's continuation, around again where that reaches the text's end."""
    row = tl.program_id(0)
    slot = tl.load(slots + row)
    newest = tl.load(length + slot) - 1
    span = tl.arange(0, PADDED_SPANS)
    # Programs of the other spans left nothing.
    best = tl.max(tl.load(keys + row * spans + span, mask=(span < spans) & (span * SPAN < newest), other=0))
    distance = tl.where(best > 0, newest - best % capacity, 1)
    offset = tl.arange(0, PADDED_DRAFTS)
    source = newest + 1 - distance + offset % distance
    source = tl.minimum(tl.maximum(source, 0), capacity - 1)
    token = tl.load(tokens + slot * token_slot + source, mask=offset < drafted, other=0)
    tl.store(drafts + row * drafted + offset, token, mask=offset < drafted)
    tl.store(lens + row, tl.where(best > 0, drafted, 0).to(tl.int64))


def match_launches(
    tokens: torch.Tensor,
    length: torch.Tensor,
    slots: torch.Tensor,
    drafts: torch.Tensor,
    lens: torch.Tensor,
    keys: torch.Tensor,
    max_ngram: int,
    min_ngram: int,
) -> tuple[Launch, Launch]:
    """The two launches; as :func:`match`, with ``keys`` int64 ``[B, spans]``."""
    rows, drafted = drafts.shape
    capacity = tokens.shape[1]
    spans = keys.shape[1]
    text = {
        "tokens": tokens,
        "length": length,
        "slots": slots,
        "keys": keys,
        "token_slot": tokens.stride(0),
        "capacity": capacity,
        "SPAN": SPAN,
    }
    partial = Launch(match_partial, (spans, rows), {**text, "MAX_NGRAM": max_ngram, "MIN_NGRAM": min_ngram})
    combine = Launch(
        match_combine,
        (rows,),
        {
            **text,
            "drafts": drafts,
            "lens": lens,
            "spans": spans,
            "drafted": drafted,
            "PADDED_SPANS": power_of_2(spans),
            "PADDED_DRAFTS": power_of_2(drafted),
        },
        warps=1,
    )
    return partial, combine


def match(
    tokens: torch.Tensor, length: torch.Tensor, slots: torch.Tensor, max_ngram: int, min_ngram: int, draft_len: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """``speccompile::match_ngram`` on CUDA; arguments and result as the op's ``reference`` has them."""
    drafts = tokens.new_empty((len(slots), draft_len))
    lens = tokens.new_empty(len(slots))
    keys = tokens.new_empty((len(slots), -(-tokens.shape[1] // SPAN)))
    run_all(match_launches(tokens, length, slots, drafts, lens, keys, max_ngram, min_ngram), tokens)
    return drafts, lens

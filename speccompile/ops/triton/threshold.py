"""Top-k and top-p without sorting: a search for the least score that stays, bit by bit.

Both are one search for the greatest threshold at which the scores from it on weigh enough. A score weighs 1 (top-k) or
its probability (top-p). Scores are compared as integers of the same order, and each pass over them finds two bits of
the threshold. The order of sums follows from V alone, so a place's result does not depend on other places.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from speccompile.ops.tolerances import ROUNDING
from speccompile.ops.triton.launch import Launch, run_all

# Ids that a program reads at once.
BLOCK = 2048


@triton.jit
def _mass(value, highest):  # type: ignore[no-untyped-def]
    # Infinite scores, too, are as likely as each other.
    return tl.where(value == highest, 1.0, tl.exp(value - highest))


@triton.jit
def _ordered(value):  # type: ignore[no-untyped-def]
    """int32 in the order of the floats; a NaN is greatest."""
    bits = value.to(tl.int32, bitcast=True)
    bits = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    return tl.where(value != value, 0x7FFFFFFF, bits)


@triton.jit
def mask_rows(  # type: ignore[no-untyped-def]
    scores,
    limit,
    score_row,
    score_place,
    vocab,
    MASS: tl.constexpr,
    ROUNDING: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Program (place, row): replace every score below the threshold by -inf. ``limit`` is k, or p with ``MASS``,
    which a sum reaches if it is at most ``ROUNDING`` below."""
    place, row = tl.program_id(0), tl.program_id(1)
    row_limit = tl.load(limit + row).to(tl.float32)
    if MASS:
        idle = row_limit >= 1
    else:
        idle = row_limit <= 0
    if idle:
        return
    scores += row.to(tl.int64) * score_row + place.to(tl.int64) * score_place
    lane = tl.arange(0, BLOCK)
    highest = 0.0
    enough = tl.minimum(row_limit, vocab)
    if MASS:
        top = tl.full((BLOCK,), float("-inf"), tl.float32)
        for first in range(0, vocab, BLOCK):
            top = tl.maximum(top, tl.load(scores + first + lane, mask=first + lane < vocab, other=float("-inf")))
        highest = tl.max(top)
        total = tl.zeros((BLOCK,), tl.float32)
        for first in range(0, vocab, BLOCK):
            there = first + lane < vocab
            value = tl.load(scores + first + lane, mask=there, other=float("-inf"))
            total += tl.where(there, _mass(value, highest), 0.0)
        enough = (row_limit - ROUNDING) * tl.sum(total)

    # The border, less the least int32. It stays 0, which is a NaN as a float, if everything together is not enough.
    found = tl.program_id(0).to(tl.int64) * 0
    for turn in range(16):
        shift = 30 - 2 * turn
        step = (found * 0 + 1) << shift
        lowest = found - 2147483648
        low = (lowest + step).to(tl.int32)
        middle = (lowest + 2 * step).to(tl.int32)
        high = (lowest + 3 * step).to(tl.int32)
        from_low = tl.zeros((BLOCK,), tl.float32)
        from_middle = tl.zeros((BLOCK,), tl.float32)
        from_high = tl.zeros((BLOCK,), tl.float32)
        for first in range(0, vocab, BLOCK):
            there = first + lane < vocab
            value = tl.load(scores + first + lane, mask=there, other=float("-inf"))
            key = _ordered(value)
            if MASS:
                weight = tl.where(there, _mass(value, highest), 0.0)
            else:
                weight = tl.where(there, 1.0, 0.0)
            from_low += tl.where(key >= low, weight, 0.0)
            from_middle += tl.where(key >= middle, weight, 0.0)
            from_high += tl.where(key >= high, weight, 0.0)
        reached = (tl.sum(from_low) >= enough).to(tl.int64)
        reached += (tl.sum(from_middle) >= enough).to(tl.int64)
        reached += (tl.sum(from_high) >= enough).to(tl.int64)
        found += reached * step
    border = (found - 2147483648).to(tl.int32)
    border = tl.where(border < 0, border ^ 0x7FFFFFFF, border)
    least = border.to(tl.float32, bitcast=True)
    for first in range(0, vocab, BLOCK):
        there = first + lane < vocab
        value = tl.load(scores + first + lane, mask=there, other=float("-inf"))
        tl.store(scores + first + lane, float("-inf"), mask=there & (value < least))


def threshold_launch(scores: torch.Tensor, limit: torch.Tensor) -> Launch:
    """The launch over ``scores`` float32 ``[B, T, V]`` with contiguous ids.

    Args:
        limit: int64 ``[B]``, the number of greatest scores that stay (0 for all), or float32 ``[B]``, their total
            probability (1 for all).
    """
    rows, width, vocab = scores.shape
    arguments = {
        "scores": scores,
        "limit": limit,
        "score_row": scores.stride(0),
        "score_place": scores.stride(1),
        "vocab": vocab,
        "MASS": limit.dtype.is_floating_point,
        "ROUNDING": ROUNDING,
        "BLOCK": BLOCK,
    }
    return Launch(mask_rows, (width, rows), arguments, warps=8)


def mask_below_threshold(scores: torch.Tensor, limit: torch.Tensor) -> None:
    """Set all other scores to -inf, in place. Arguments as of :func:`threshold_launch`."""
    run_all([threshold_launch(scores, limit.contiguous())], scores)

"""Typical-p without sorting: a search for the greatest distance from the entropy that stays, bit by bit."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from speccompile.ops.tolerances import TYPICAL_P_ROUNDING
from speccompile.ops.triton.launch import Launch, run_all
from speccompile.ops.triton.threshold_kernels import mass_of

# Ids that a program reads at once.
BLOCK = 2048


@triton.jit
def _distance(value, highest, log_total, entropy):  # type: ignore[no-untyped-def]
    return tl.abs((log_total - (value - highest)) - entropy)


@triton.jit
def mask_untypical(  # type: ignore[no-untyped-def]
    scores, limit, score_row, score_place, vocab, ROUNDING: tl.constexpr, BLOCK: tl.constexpr
):
    """Program (place, row): set to -inf each score whose information is farther from the entropy than that of the
    nearest scores with the mass ``limit``. It returns at once for a row whose limit is 1.
    """
    place, row = tl.program_id(0), tl.program_id(1)
    wanted = tl.load(limit + row)
    if wanted >= 1:
        return
    scores += row.to(tl.int64) * score_row + place.to(tl.int64) * score_place
    lane = tl.arange(0, BLOCK)
    top = tl.full((BLOCK,), float("-inf"), tl.float32)
    for first in range(0, vocab, BLOCK):
        value = tl.load(scores + first + lane, mask=first + lane < vocab, other=float("-inf"))
        top = tl.maximum(top, tl.where(value == value, value, float("-inf")))
    highest = tl.max(top)
    if tl.abs(highest) == float("inf"):
        return
    total = tl.zeros((BLOCK,), tl.int64)
    weighted = tl.zeros((BLOCK,), tl.float64)
    for first in range(0, vocab, BLOCK):
        value = tl.load(scores + first + lane, mask=first + lane < vocab, other=float("-inf"))
        finite = value > float("-inf")
        mass = tl.where(finite, mass_of(value, highest), 0)
        total += mass
        weighted += tl.where(finite, (value - highest).to(tl.float64) * mass.to(tl.float64), 0.0)
    whole = tl.sum(total)
    # log of the softmax's denominator, relative to the greatest score, whose mass is one unit.
    unit = mass_of(highest, highest).to(tl.float64)
    log_total = tl.log((whole.to(tl.float64) / unit).to(tl.float32))
    entropy = log_total - (tl.sum(weighted) / whole.to(tl.float64)).to(tl.float32)
    enough = tl.maximum(((wanted - ROUNDING).to(tl.float64) * whole.to(tl.float64)).to(tl.int64), 1)

    # The greatest distance at which there is not enough; its bits are in the order of the distances.
    low = tl.full((), -1, tl.int64)
    end = tl.full((), 0x7F800000, tl.int64)
    while end - low > 1:
        middle = (low + end) // 2
        within = tl.zeros((BLOCK,), tl.int64)
        for first in range(0, vocab, BLOCK):
            value = tl.load(scores + first + lane, mask=first + lane < vocab, other=float("-inf"))
            key = _distance(value, highest, log_total, entropy).to(tl.int32, bitcast=True)
            within += tl.where((value > float("-inf")) & (key <= middle), mass_of(value, highest), 0)
        reached = tl.sum(within) >= enough
        low = tl.where(reached, low, middle)
        end = tl.where(reached, middle, end)
    for first in range(0, vocab, BLOCK):
        there = first + lane < vocab
        value = tl.load(scores + first + lane, mask=there, other=float("-inf"))
        key = _distance(value, highest, log_total, entropy).to(tl.int32, bitcast=True)
        tl.store(scores + first + lane, float("-inf"), mask=there & (value == value) & (key > end))


def typical_launch(scores: torch.Tensor, limit: torch.Tensor) -> Launch:
    """The launch over ``scores`` float32 ``[B, T, V]`` with contiguous ids; ``limit`` float32 ``[B]``, 1 for all."""
    rows, width, vocab = scores.shape
    arguments = {
        "scores": scores,
        "limit": limit,
        "score_row": scores.stride(0),
        "score_place": scores.stride(1),
        "vocab": vocab,
        "ROUNDING": TYPICAL_P_ROUNDING,
        "BLOCK": BLOCK,
    }
    return Launch(mask_untypical, (width, rows), arguments, warps=8)


def mask_untypical_scores(scores: torch.Tensor, limit: torch.Tensor) -> None:
    """``typical_p_`` on CUDA. Arguments as of :func:`typical_launch`."""
    run_all([typical_launch(scores, limit.contiguous())], scores)

"""Scores without NaN and infinities, and scores as logarithms of probabilities. Other rows read no scores."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from speccompile.ops.triton import token_lists
from speccompile.ops.triton.launch import Launch, run_all
from speccompile.ops.triton.token_lists import every_split, of_scores

# Ids that a program reads at once.
BLOCK = 2048
_GREATEST = tl.constexpr(3.4028234663852886e38)


@triton.jit
def make_finite(scores, score_row, score_place, vocab, wanted, SPAN: tl.constexpr):  # type: ignore[no-untyped-def]
    """Program (split, place, row): 0 for NaN, and the greatest and least finite number for infinities."""
    split, place, row = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    if tl.load(wanted + row) == 0:
        return
    ids = split * SPAN + tl.arange(0, SPAN)
    scores += row.to(tl.int64) * score_row + place.to(tl.int64) * score_place
    value = tl.load(scores + ids, mask=ids < vocab, other=0.0)
    value = tl.where(value == value, value, 0.0)
    value = tl.minimum(tl.maximum(value, -_GREATEST), _GREATEST)
    tl.store(scores + ids, value, mask=ids < vocab)


@triton.jit
def normalize(scores, score_row, score_place, vocab, wanted, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Program (place, row): subtract the logarithm of the sum of the exponentials."""
    place, row = tl.program_id(0), tl.program_id(1)
    if tl.load(wanted + row) == 0:
        return
    scores += row.to(tl.int64) * score_row + place.to(tl.int64) * score_place
    lane = tl.arange(0, BLOCK)
    top = tl.full((BLOCK,), float("-inf"), tl.float32)
    for first in range(0, vocab, BLOCK):
        value = tl.load(scores + first + lane, mask=first + lane < vocab, other=float("-inf"))
        top = tl.maximum(top, tl.where(value == value, value, float("-inf")))
    highest = tl.max(top)
    total = tl.zeros((BLOCK,), tl.float32)
    for first in range(0, vocab, BLOCK):
        there = first + lane < vocab
        value = tl.load(scores + first + lane, mask=there, other=0.0)
        # NaN, and an infinite score, turn all scores into NaN, as in torch.
        total += tl.where(there, tl.exp(value - highest), 0.0)
    log_total = tl.log(tl.sum(total))
    for first in range(0, vocab, BLOCK):
        there = first + lane < vocab
        value = tl.load(scores + first + lane, mask=there, other=0.0)
        tl.store(scores + first + lane, value - highest - log_total, mask=there)


def remove_invalid(scores: torch.Tensor, wanted: torch.Tensor) -> None:
    """``remove_invalid_values_`` on CUDA: ``wanted`` bool ``[B]``."""
    arguments = {**of_scores(scores), "wanted": wanted.contiguous(), "SPAN": token_lists.SPAN}
    run_all([Launch(make_finite, every_split(scores), arguments, warps=8)], scores)


def renormalize(scores: torch.Tensor, wanted: torch.Tensor) -> None:
    """``renormalize_logits_`` on CUDA: ``wanted`` bool ``[B]``."""
    arguments = {**of_scores(scores), "wanted": wanted.contiguous(), "BLOCK": BLOCK}
    run_all([Launch(normalize, (scores.shape[1], scores.shape[0]), arguments, warps=8)], scores)

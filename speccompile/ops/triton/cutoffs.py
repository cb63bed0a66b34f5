"""Epsilon and eta cutoff. Rows without them read no scores."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from speccompile.ops.triton.launch import Launch, run_all
from speccompile.ops.triton.token_lists import of_scores

# Ids that a program reads at once.
BLOCK = 2048


@triton.jit
def _score(scores, ids, vocab):  # type: ignore[no-untyped-def]
    return tl.load(scores + ids, mask=ids < vocab, other=float("-inf"))


@triton.jit
def _stays(value, highest, limit):  # type: ignore[no-untyped-def]
    """Whether a score's share of the greatest one's probability reaches ``limit``."""
    return (value == highest) | (tl.exp(value - highest) >= limit)


@triton.jit
def mask_unlikely(scores, score_row, score_place, vocab, epsilon, eta, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Program (place, row): replace scores by -inf whose probability is below ``epsilon``, then those below the limit
    that follows from ``eta`` and the entropy of what stays. It returns at once for a row where both are 0."""
    place, row = tl.program_id(0), tl.program_id(1)
    least, desired = tl.load(epsilon + row), tl.load(eta + row)
    if (least <= 0) & (desired <= 0):
        return
    scores += row.to(tl.int64) * score_row + place.to(tl.int64) * score_place
    lane = tl.arange(0, BLOCK)
    top = tl.full((BLOCK,), float("-inf"), tl.float32)
    for first in range(0, vocab, BLOCK):
        value = _score(scores, first + lane, vocab)
        top = tl.maximum(top, tl.where(value == value, value, float("-inf")))
    highest = tl.max(top)
    if tl.abs(highest) == float("inf"):
        return
    total = tl.zeros((BLOCK,), tl.float32)
    for first in range(0, vocab, BLOCK):
        total += tl.exp(_score(scores, first + lane, vocab) - highest)
    limit = least * tl.sum(total)
    total = tl.zeros((BLOCK,), tl.float32)
    weighted = tl.zeros((BLOCK,), tl.float32)
    for first in range(0, vocab, BLOCK):
        value = _score(scores, first + lane, vocab)
        share = tl.where(_stays(value, highest, limit), tl.exp(value - highest), 0.0)
        total += share
        weighted += tl.where(share > 0, (value - highest) * share, 0.0)
    whole = tl.sum(total)
    # exp(-entropy) of what stays.
    certainty = tl.exp(tl.sum(weighted) / whole) / whole
    limit = tl.maximum(limit, tl.minimum(desired, tl.sqrt(desired) * certainty) * whole)
    for first in range(0, vocab, BLOCK):
        value = _score(scores, first + lane, vocab)
        gone = (value == value) & ~_stays(value, highest, limit)
        tl.store(scores + first + lane, float("-inf"), mask=(first + lane < vocab) & gone)


def mask_unlikely_scores(scores: torch.Tensor, epsilon: torch.Tensor, eta: torch.Tensor) -> None:
    """``cutoffs_`` on CUDA: ``epsilon`` and ``eta`` float32 ``[B]``, 0 for none."""
    own = {"epsilon": epsilon.contiguous(), "eta": eta.contiguous(), "BLOCK": BLOCK}
    grid = scores.shape[1], scores.shape[0]
    run_all([Launch(mask_unlikely, grid, {**of_scores(scores), **own}, warps=8)], scores)

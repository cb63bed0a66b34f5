"""Penalties on tokens that have occurred: two kernels count these, a third changes scores.

Rows without a penalty return at once.
"""

from __future__ import annotations

from typing import Literal

import torch
import triton
import triton.language as tl

from speccompile.ops.triton.launch import Launch, run_all
from speccompile.ops.triton.token_lists import SPAN, every_split, of_scores

Penalty = Literal["repetition", "presence", "frequency"]

# Places of a context that a program counts.
PLACES = 1024


@triton.jit
def _is_idle(penalty, row, REPETITION: tl.constexpr):  # type: ignore[no-untyped-def]
    value = tl.load(penalty + row)
    if REPETITION:
        return value == 1.0
    else:
        return value == 0.0


@triton.jit
def clear_counts(counts, penalty, vocab, REPETITION: tl.constexpr, SPAN: tl.constexpr):  # type: ignore[no-untyped-def]
    """Program (split, row)."""
    split, row = tl.program_id(0), tl.program_id(1)
    if _is_idle(penalty, row, REPETITION):
        return
    ids = split * SPAN + tl.arange(0, SPAN)
    tl.store(counts + row.to(tl.int64) * vocab + ids, tl.zeros((SPAN,), tl.int32), mask=ids < vocab)


@triton.jit
def count_tokens(  # type: ignore[no-untyped-def]
    counts, penalty, vocab, context, capacity, length, start, REPETITION: tl.constexpr, PLACES: tl.constexpr
):
    """Program (block of places, row): the tokens from ``start`` to the row's length; None is 0."""
    block, row = tl.program_id(0), tl.program_id(1)
    if _is_idle(penalty, row, REPETITION):
        return
    places = block * PLACES + tl.arange(0, PLACES)
    counted = places < tl.minimum(tl.load(length + row), capacity)
    if start is not None:
        counted = counted & (places >= tl.load(start + row))
    token = tl.load(context + row.to(tl.int64) * capacity + places, mask=counted, other=-1)
    counted = counted & (token >= 0) & (token < vocab)
    tl.atomic_add(counts + row.to(tl.int64) * vocab + token, 1, mask=counted, sem="relaxed")


@triton.jit
def penalise(  # type: ignore[no-untyped-def]
    scores,
    score_row,
    score_place,
    vocab,
    counts,
    penalty,
    context,
    capacity,
    length,
    start,
    REPETITION: tl.constexpr,
    FREQUENCY: tl.constexpr,
    SPAN: tl.constexpr,
):
    """Program (split, place, row). Of the drafts, those before the place are added to the row's counts."""
    split, place, row = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    if _is_idle(penalty, row, REPETITION):
        return
    value = tl.load(penalty + row)
    ids = split * SPAN + tl.arange(0, SPAN)
    times = tl.load(counts + row.to(tl.int64) * vocab + ids, mask=ids < vocab, other=0)
    first = tl.load(length + row)
    for draft in range(0, place):
        at = first + draft
        counted = at < capacity
        if start is not None:
            counted = counted & (at >= tl.load(start + row))
        times += (ids == tl.load(context + row.to(tl.int64) * capacity + at, mask=counted, other=-1)).to(tl.int32)
    scores += row.to(tl.int64) * score_row + place.to(tl.int64) * score_place
    score = tl.load(scores + ids, mask=ids < vocab, other=0.0)
    if REPETITION:
        changed = tl.where(score < 0, score * value, tl.math.div_rn(score, tl.zeros_like(score) + value))
    elif FREQUENCY:
        changed = score - times.to(tl.float32) * value
    else:
        changed = score - value
    tl.store(scores + ids, changed, mask=(ids < vocab) & (times > 0))


def penalise_scores(
    scores: torch.Tensor,
    context: torch.Tensor,
    length: torch.Tensor,
    penalty: torch.Tensor,
    start: torch.Tensor | None = None,
    *,
    kind: Penalty,
) -> None:
    """Change ``scores`` float32 ``[B, T, V]`` in place.

    Args:
        context, length: as :meth:`speccompile.sampling.base.Processor.apply` has them.
        penalty: float32 ``[B]``, 1 (repetition) or 0 for none.
        start: int64 ``[B]``, the place of the first token that counts; None is 0.
    """
    rows, _, vocab = scores.shape
    capacity = context.shape[1]
    counts = torch.empty((rows, vocab), dtype=torch.int32, device=scores.device)
    common = {"counts": counts, "penalty": penalty, "REPETITION": kind == "repetition"}
    text = {"context": context.contiguous(), "capacity": capacity, "length": length, "start": start}
    cleared = {**common, "vocab": vocab, "SPAN": SPAN}
    counted = {**common, **text, "vocab": vocab, "PLACES": PLACES}
    applied = {**common, **text, **of_scores(scores), "FREQUENCY": kind == "frequency", "SPAN": SPAN}
    launches = (
        Launch(clear_counts, (-(-vocab // SPAN), rows), cleared, warps=8),
        Launch(count_tokens, (-(-capacity // PLACES), rows), counted),
        Launch(penalise, every_split(scores), applied, warps=8),
    )
    run_all(launches, scores)

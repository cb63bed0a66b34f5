"""Processors with few numbers a row: lists of tokens, a mask, a temperature. Rows without them read no scores."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from speccompile.ops.triton.launch import Launch, run_all
from speccompile.ops.triton.threshold_kernels import score_of

# Ids of a program.
SPAN = 4096


@triton.jit
def forbid_listed(  # type: ignore[no-untyped-def]
    scores,
    score_row,
    score_place,
    vocab,
    ids,
    size,
    length,
    bound,
    AT: tl.constexpr,
    SIZE: tl.constexpr,
):
    """Program (place, row): -inf for the listed ids; with ``bound`` only of contexts that are as long (``AT``) or
    shorter."""
    place, row = tl.program_id(0), tl.program_id(1)
    if bound is not None:
        context = tl.load(length + row) + place
        limit = tl.load(bound + row)
        if AT:
            if context != limit:
                return
        else:
            if context >= limit:
                return
    lane = tl.arange(0, SIZE)
    token = tl.load(ids + row.to(tl.int64) * size + lane, mask=lane < size, other=-1)
    scores += row.to(tl.int64) * score_row + place.to(tl.int64) * score_place
    tl.store(scores + token, float("-inf"), mask=(token >= 0) & (token < vocab))


@triton.jit
def add_bias(scores, score_row, score_place, vocab, ids, values, size, SIZE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Program (place, row): add the values to the scores of the listed ids, of which no two are equal."""
    place, row = tl.program_id(0), tl.program_id(1)
    lane = tl.arange(0, SIZE)
    token = tl.load(ids + row.to(tl.int64) * size + lane, mask=lane < size, other=-1)
    listed = (token >= 0) & (token < vocab)
    bias = tl.load(values + row.to(tl.int64) * size + lane, mask=listed, other=0.0)
    scores += row.to(tl.int64) * score_row + place.to(tl.int64) * score_place
    tl.store(scores + token, tl.load(scores + token, mask=listed, other=0.0) + bias, mask=listed)


@triton.jit
def force_listed(scores, score_row, score_place, vocab, ids, size, length, limit, SPAN: tl.constexpr):  # type: ignore[no-untyped-def]
    """Program (split, place, row): at the last place of a request, 0 for the listed ids and -inf for others."""
    split, place, row = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    ids += row.to(tl.int64) * size
    if (tl.load(ids) < 0) | (tl.load(length + row) + place != tl.load(limit + row) - 1):
        return
    own = split * SPAN + tl.arange(0, SPAN)
    value = tl.full((SPAN,), float("-inf"), tl.float32)
    for index in range(0, size):
        value = tl.where(own == tl.load(ids + index), 0.0, value)
    scores += row.to(tl.int64) * score_row + place.to(tl.int64) * score_place
    tl.store(scores + own, value, mask=own < vocab)


@triton.jit
def keep_allowed(  # type: ignore[no-untyped-def]
    scores, score_row, score_place, vocab, asks, allowed, allowed_row, allowed_place, SPAN: tl.constexpr
):
    """Program (split, place, row): -inf for ids whose bit in ``allowed`` ``[B, places, words]`` is 0."""
    split, place, row = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    if tl.load(asks + row) == 0:
        return
    ids = split * SPAN + tl.arange(0, SPAN)
    allowed += row.to(tl.int64) * allowed_row + place * allowed_place
    bits = tl.load(allowed + ids // 32, mask=ids < vocab, other=-1) >> (ids % 32)
    scores += row.to(tl.int64) * score_row + place.to(tl.int64) * score_place
    tl.store(scores + ids, float("-inf"), mask=(ids < vocab) & (bits & 1 == 0))


@triton.jit
def divide(scores, score_row, score_place, vocab, temperature, SPAN: tl.constexpr):  # type: ignore[no-untyped-def]
    """Program (split, place, row): divide the scores by the temperature of the row."""
    split, place, row = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    divisor = tl.load(temperature + row)
    if (divisor == 0.0) | (divisor == 1.0):
        return
    ids = split * SPAN + tl.arange(0, SPAN)
    scores += row.to(tl.int64) * score_row + place.to(tl.int64) * score_place
    tl.store(scores + ids, score_of(scores, ids, ids < vocab, temperature, row), mask=ids < vocab)


def of_scores(scores: torch.Tensor) -> dict[str, Any]:
    """The arguments of a kernel that changes ``scores`` float32 ``[B, T, V]`` with contiguous ids."""
    strides = {"score_row": scores.stride(0), "score_place": scores.stride(1)}
    return {"scores": scores, **strides, "vocab": scores.shape[-1]}


def every_split(scores: torch.Tensor) -> tuple[int, int, int]:
    """The grid of programs that change :data:`SPAN` scores of a place each."""
    rows, width, vocab = scores.shape
    return -(-vocab // SPAN), width, rows


def forbid(
    scores: torch.Tensor,
    length: torch.Tensor,
    ids: torch.Tensor,
    bound: torch.Tensor | None = None,
    *,
    at: bool = False,
) -> None:
    """Set the scores of ``ids`` int64 ``[B, C]`` to -inf; -1 is not an id.

    Args:
        bound: int64 ``[B]``: applies only to tokens after fewer than ``bound`` others or, with ``at``, exactly so many.
    """
    size = ids.shape[1]
    own = {"ids": ids.contiguous(), "size": size, "length": length, "bound": bound}
    arguments = {**of_scores(scores), **own, "AT": at, "SIZE": triton.next_power_of_2(size)}
    run_all([Launch(forbid_listed, (scores.shape[1], scores.shape[0]), arguments)], scores)


def bias(scores: torch.Tensor, ids: torch.Tensor, values: torch.Tensor) -> None:
    """Add ``values`` float32 ``[B, C]`` to the scores of ``ids`` int64 ``[B, C]``; -1 is not an id."""
    size = ids.shape[1]
    own = {"ids": ids.contiguous(), "values": values.contiguous(), "size": size, "SIZE": triton.next_power_of_2(size)}
    run_all([Launch(add_bias, (scores.shape[1], scores.shape[0]), {**of_scores(scores), **own})], scores)


def force(scores: torch.Tensor, length: torch.Tensor, ids: torch.Tensor, limit: torch.Tensor) -> None:
    """Forbid all but ``ids`` int64 ``[B, C]`` as the last token before ``limit`` int64 ``[B]``; a row whose first id is
    -1 is not changed.
    """
    own = {"ids": ids.contiguous(), "size": ids.shape[1], "length": length, "limit": limit, "SPAN": SPAN}
    run_all([Launch(force_listed, every_split(scores), {**of_scores(scores), **own}, warps=8)], scores)


def allow(scores: torch.Tensor, asks: torch.Tensor, allowed: torch.Tensor) -> None:
    """Leave what is ``allowed`` in rows that ``asks`` bool ``[B]``.

    Args:
        allowed: int32 ``[B, P, ceil(V / 32)]`` with contiguous words: a bit for each token at each of P >= T positions.
    """
    strides = {"allowed_row": allowed.stride(0), "allowed_place": allowed.stride(1)}
    own = {"asks": asks, "allowed": allowed, **strides, "SPAN": SPAN}
    run_all([Launch(keep_allowed, every_split(scores), {**of_scores(scores), **own}, warps=8)], scores)


def heat(scores: torch.Tensor, temperature: torch.Tensor) -> None:
    """Divide by ``temperature`` float32 ``[B]``, where it is not 0."""
    own = {"temperature": temperature, "SPAN": SPAN}
    run_all([Launch(divide, every_split(scores), {**of_scores(scores), **own}, warps=8)], scores)

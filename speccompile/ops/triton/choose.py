"""The token of each position: argmax of the scores plus noise that is generated where it is added.

The noise is that of ``speccompile.ops.noise``: the same integers, Gumbels equal to a few ulp. It is never
written to memory, and the scores are read once.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from speccompile.ops.triton.launch import Launch, run_all

# Ids that a program reads at once, and in all. Which program reads which ids does not change the outcome.
BLOCK = 1024
SPAN = 4 * BLOCK
# Splits that the second kernel reads at once.
SPLITS = 64

_GOLDEN = tl.constexpr(0x9E3779B97F4A7C15)


@triton.jit
def _mix64(x):  # type: ignore[no-untyped-def]
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)


@triton.jit
def _mix32(x):  # type: ignore[no-untyped-def]
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def key_of(seed, stream, position, start):  # type: ignore[no-untyped-def]
    """``noise.keys`` of one place, uint64; integers as they are loaded, ``start`` may be None."""
    key = _mix64(seed.to(tl.uint64) + _GOLDEN)
    key = _mix64(key + (position + 1).to(tl.uint64) * _GOLDEN)
    key = _mix64(key + (tl.cast(stream, tl.uint64) + 1) * _GOLDEN)
    if start is not None:
        key = _mix64(key + (start + 1).to(tl.uint64) * _GOLDEN)
    return key


@triton.jit
def bits_of(key, ids):  # type: ignore[no-untyped-def]
    """``noise.bits_of``, uint32."""
    low, high = (key & 0xFFFFFFFF).to(tl.uint32), (key >> 32).to(tl.uint32)
    return _mix32(_mix32((ids.to(tl.uint32) * 0x9E3779B9) ^ low) + high)


@triton.jit
def gumbel_of(bits):  # type: ignore[no-untyped-def]
    """``noise.uniform`` and the Gumbel of it, float32."""
    uniform = ((bits >> 1).to(tl.int32).to(tl.float32) + 0.5) * 4.656612873077393e-10  # 2^-31
    uniform = tl.minimum(uniform, 0.9999999403953552)  # 1 - 2^-24
    # log1p(-u), which triton has not: the rounding of 1 - u is divided out (Kahan; Higham, "Accuracy and Stability of
    # Numerical Algorithms", 1.14.1).
    rest = 1.0 - uniform
    ratio = tl.math.div_rn(uniform, tl.where(rest == 1.0, 1.0, 1.0 - rest))
    exponential = tl.where(rest == 1.0, uniform, -tl.log(rest) * ratio)
    return -tl.log(exponential)


@triton.jit
def choose_partial(  # type: ignore[no-untyped-def]
    scores,
    temperature,
    seed,
    positions,
    start,
    best_value,
    best_id,
    score_row,
    score_place,
    noise_stream,
    first_id,
    vocab,
    NOISE: tl.constexpr,
    BLOCK: tl.constexpr,
    SPAN: tl.constexpr,
):
    """Program (split, place, row): the greatest of ids ``split * SPAN ...`` and its score, NaN if any of them is."""
    split, place, row = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    width = tl.num_programs(1)
    scores += row.to(tl.int64) * score_row + place.to(tl.int64) * score_place
    lane = tl.arange(0, BLOCK)
    top = tl.full((BLOCK,), float("-inf"), tl.float32)
    chosen = split * SPAN + lane
    spoiled = tl.zeros((BLOCK,), tl.int32)
    draws = False
    if NOISE:
        draws = tl.load(temperature + row) > 0
        since = None
        if start is not None:
            since = tl.load(start + row)
        key = key_of(tl.load(seed + row), noise_stream, tl.load(positions + row * width + place), since)
    for offset in range(0, SPAN, BLOCK):
        ids = split * SPAN + offset + lane
        value = tl.load(scores + ids, mask=ids < vocab, other=float("-inf")).to(tl.float32)
        if NOISE:
            value = tl.where(draws, value + gumbel_of(bits_of(key, first_id + ids)), value)
        spoiled = spoiled | (value != value).to(tl.int32)
        # Of equal ones the first stays.
        chosen = tl.where(value > top, ids, chosen)
        top = tl.maximum(top, value)
    highest = tl.max(top)
    at = (row * width + place) * tl.num_programs(0) + split
    tl.store(best_id + at, tl.min(tl.where(top == highest, chosen, vocab)))
    tl.store(best_value + at, tl.where(tl.max(spoiled) > 0, float("nan"), highest))


@triton.jit
def choose_combine(  # type: ignore[no-untyped-def]
    best_value,
    best_id,
    tokens,
    splits,
    vocab,
    FORBIDS: tl.constexpr,
    SPLITS: tl.constexpr,
):
    """Program (position of a row): its token, -1 if none can be chosen."""
    at = tl.program_id(0)
    lane = tl.arange(0, SPLITS)
    top = tl.full((SPLITS,), float("-inf"), tl.float32)
    chosen = tl.full((SPLITS,), 0, tl.int32) + vocab
    spoiled = tl.zeros((SPLITS,), tl.int32)
    for first in range(0, splits, SPLITS):
        there = first + lane < splits
        value = tl.load(best_value + at * splits + first + lane, mask=there, other=float("-inf"))
        token = tl.load(best_id + at * splits + first + lane, mask=there, other=vocab)
        spoiled = spoiled | (value != value).to(tl.int32)
        chosen = tl.where((value > top) | ((value == top) & (token < chosen)), token, chosen)
        top = tl.maximum(top, value)
    highest = tl.max(top)
    token = tl.min(tl.where(top == highest, chosen, vocab))
    none = tl.max(spoiled) > 0
    if FORBIDS:
        none = none | (highest == float("-inf"))
    tl.store(tokens + at, tl.where(none, -1, token).to(tl.int64))


def splits_of(vocab: int) -> int:
    """Number of parts of a vocabulary that programs reduce separately."""
    return -(-vocab // SPAN)


def choose_launches(
    scores: torch.Tensor,
    temperature: torch.Tensor | None,
    seed: torch.Tensor | None,
    positions: torch.Tensor | None,
    stream: int,
    start: torch.Tensor | None,
    tokens: torch.Tensor,
    best: tuple[torch.Tensor, torch.Tensor],
    forbids: bool,
    first_id: int = 0,
) -> tuple[Launch, Launch]:
    """The two launches; as :func:`choose`, with ``best``, float32 and int32 ``[B, T, splits]``, as a workspace."""
    rows, width, vocab = scores.shape
    found = {"best_value": best[0], "best_id": best[1]}
    partial = Launch(
        choose_partial,
        (splits_of(vocab), width, rows),
        {
            **found,
            "scores": scores,
            "temperature": temperature,
            "seed": seed,
            "positions": positions,
            "start": start,
            "score_row": scores.stride(0),
            "score_place": scores.stride(1),
            "noise_stream": stream,
            "first_id": first_id,
            "vocab": vocab,
            "NOISE": temperature is not None,
            "BLOCK": BLOCK,
            "SPAN": SPAN,
        },
    )
    combine = Launch(
        choose_combine,
        (rows * width,),
        {
            **found,
            "tokens": tokens,
            "splits": splits_of(vocab),
            "vocab": vocab,
            "FORBIDS": forbids,
            "SPLITS": SPLITS,
        },
        warps=1,
    )
    return partial, combine


def choose(
    scores: torch.Tensor,
    temperature: torch.Tensor | None = None,
    seed: torch.Tensor | None = None,
    positions: torch.Tensor | None = None,
    stream: int = 0,
    start: torch.Tensor | None = None,
    forbids: bool = False,
    first_id: int = 0,
) -> torch.Tensor:
    """``speccompile::choose_tokens`` on CUDA; arguments and result as the op's ``reference`` has them."""
    scores = scores if scores.stride(-1) == 1 else scores.contiguous()
    if temperature is not None and seed is not None and positions is not None:
        temperature, seed, positions = temperature.contiguous(), seed.contiguous(), positions.contiguous()
    rows, width, vocab = scores.shape
    tokens = torch.empty((rows, width), dtype=torch.int64, device=scores.device)
    shape = rows, width, splits_of(vocab)
    best = scores.new_empty(shape, dtype=torch.float32), scores.new_empty(shape, dtype=torch.int32)
    launches = choose_launches(scores, temperature, seed, positions, stream, start, tokens, best, forbids, first_id)
    run_all(launches, scores)
    return tokens

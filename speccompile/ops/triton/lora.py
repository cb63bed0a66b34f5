"""Low-rank adapters on CUDA: one launch for up to three linears that read one input.

A program has up to 16 tokens of a row, and every n-th tile of a linear's outputs. It multiplies its tokens with the
first matrix of the row's adapter itself, without a launch for that before it: the matrix is small, and in L2 after its
first reading. The number of programs keeps a GPU busy at any width. Those of a row without an adapter read no matrix.

Sums have a fixed order and tiles a fixed shape, so a token's bits depend on no other token, nor on the number of
programs. Source: Chen et al., "Punica" (2023), section 4, which has a launch for each of the two matrices. Not run on a
GPU yet: interpreted on a CPU, and compiled for sm_90.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from speccompile.ops.lora import COLUMNS as SIDE_BY_SIDE
from speccompile.ops.triton.launch import Launch, run_all

#: Linears of a launch: queries, keys and values.
LINEARS = 3
#: Tokens of a tile (``tl.dot`` accepts no fewer), and parts of the inputs that are summed apart: a sum is a chain of
#: products, each of which waits for the one before it.
ROWS, SPLITS = 16, 4
#: Most ranks of a product with the second matrix.
CHUNK = 32
#: About two for each multiprocessor of an H100.
PROGRAMS = 264


@triton.jit
def multiply_down(  # type: ignore[no-untyped-def]
    x,
    a,
    there,
    DEPTH: tl.constexpr,
    RANK: tl.constexpr,
    RANKS: tl.constexpr,
    ROWS: tl.constexpr,
    SPLITS: tl.constexpr,
    DEPTHS: tl.constexpr,
):
    """float32 ``[ROWS, RANKS]``: tokens at the pointers ``x`` ``[ROWS]`` times ``a`` ``[DEPTH, RANK]``."""
    rank = tl.arange(0, RANKS)
    total = tl.zeros((SPLITS, ROWS, RANKS), tl.float32)
    for start in range(0, DEPTH, SPLITS * DEPTHS):
        k = start + tl.arange(0, SPLITS)[:, None] * DEPTHS + tl.arange(0, DEPTHS)[None, :]
        of_tokens = (k < DEPTH)[:, None, :] & there[None, :, None]
        values = tl.load(x[None, :, None] + k[:, None, :], mask=of_tokens, other=0.0)
        of_ranks = (k < DEPTH)[:, :, None] & (rank < RANK)[None, None, :]
        weights = tl.load(a + k[:, :, None] * RANK + rank[None, None, :], mask=of_ranks, other=0.0)
        if values.dtype != weights.dtype:
            values, weights = values.to(tl.float32), weights.to(tl.float32)
        total = tl.dot(values, weights, total, input_precision="ieee")
    return tl.sum(total, 0)


@triton.jit
def multiply_up(  # type: ignore[no-untyped-def]
    hidden,
    b,
    column,
    features,
    RANK: tl.constexpr,
    RANKS: tl.constexpr,
    ROWS: tl.constexpr,
    CHUNK: tl.constexpr,
    SIDE_BY_SIDE: tl.constexpr,
):
    """float32 ``[ROWS, COLUMNS]``: ``hidden`` ``[ROWS, RANKS]`` times outputs ``column`` of ``b``."""
    chunk, lane = tl.arange(0, RANKS // CHUNK), tl.arange(0, CHUNK)
    rank = chunk[:, None] * CHUNK + lane[None, :]
    block = column // SIDE_BY_SIDE * SIDE_BY_SIDE * RANK + column % SIDE_BY_SIDE
    there = (rank < RANK)[:, :, None] & (column < features)[None, None, :]
    up = tl.load(b + block[None, None, :] + rank[:, :, None] * SIDE_BY_SIDE, mask=there, other=0.0).to(tl.float32)
    # By chunks, since each of the warps side by side has all of the left operand in its registers.
    parts = tl.trans(tl.reshape(hidden, (ROWS, RANKS // CHUNK, CHUNK)), (1, 0, 2))
    return tl.sum(tl.dot(parts, up, input_precision="ieee"), 0)


@triton.jit(do_not_specialize=["width", "first", "parts_0", "parts_1", "parts_2"])
def add_adapters(  # type: ignore[no-untyped-def]
    x,
    old_0,
    old_1,
    old_2,
    new_0,
    new_1,
    new_2,
    a_0,
    a_1,
    a_2,
    b_0,
    b_1,
    b_2,
    ranks,
    scales,
    places,
    width,
    first,
    x_stride,
    stride_0,
    stride_1,
    stride_2,
    features_0,
    features_1,
    features_2,
    parts_0,
    parts_1,
    parts_2,
    OF_LAYER: tl.constexpr,
    DEPTH: tl.constexpr,
    RANK: tl.constexpr,
    RANKS: tl.constexpr,
    ROWS: tl.constexpr,
    SPLITS: tl.constexpr,
    DEPTHS: tl.constexpr,
    COLUMNS: tl.constexpr,
    CHUNK: tl.constexpr,
    SIDE_BY_SIDE: tl.constexpr,
):
    """Program (part of a linear, tile of a row's tokens). ``new`` has no gaps between tokens, ``old`` has a stride."""
    part, number = tl.program_id(0), 0
    old, new, a, b, stride, features, parts = old_0, new_0, a_0, b_0, stride_0, features_0, parts_0
    if part >= parts_0 + parts_1:
        part -= parts_0 + parts_1
        number = 2
        old, new, a, b, stride, features, parts = old_2, new_2, a_2, b_2, stride_2, features_2, parts_2
    elif part >= parts_0:
        part -= parts_0
        number = 1
        old, new, a, b, stride, features, parts = old_1, new_1, a_1, b_1, stride_1, features_1, parts_1
    tiles = tl.cdiv(width, ROWS)
    row = tl.program_id(1) // tiles
    within = (tl.program_id(1) % tiles) * ROWS + tl.arange(0, ROWS)
    there = within < width
    token = row.to(tl.int64) * width + within
    place = tl.load(places + row)
    at = place * OF_LAYER + first + number
    rank = tl.load(ranks + at, mask=place >= 0, other=0)
    scale = tl.load(scales + at, mask=place >= 0, other=0.0)
    hidden = tl.zeros((ROWS, RANKS), tl.float32)
    if rank > 0:
        hidden = multiply_down(
            x + token * x_stride, a + place * DEPTH * RANK, there, DEPTH, RANK, RANKS, ROWS, SPLITS, DEPTHS
        )
    b += place * tl.cdiv(features, SIDE_BY_SIDE) * SIDE_BY_SIDE * RANK
    for tile in range(part, tl.cdiv(features, COLUMNS), parts):
        column = tile * COLUMNS + tl.arange(0, COLUMNS)
        mask = there[:, None] & (column < features)[None, :]
        result = tl.load(old + token[:, None] * stride + column[None, :], mask=mask, other=0.0)
        if rank > 0:
            added = multiply_up(hidden, b, column, features, RANK, RANKS, ROWS, CHUNK, SIDE_BY_SIDE)
            result = (result.to(tl.float32) + added * scale).to(result.dtype)
        tl.store(new + token[:, None] * features + column[None, :], result, mask=mask)


def lora_launch(
    x: torch.Tensor,
    old: Sequence[torch.Tensor],
    new: Sequence[torch.Tensor],
    a: Sequence[torch.Tensor],
    b: Sequence[torch.Tensor],
    ranks: torch.Tensor,
    scales: torch.Tensor,
    first: int,
    places: torch.Tensor,
) -> Launch:
    """One launch for at most three linears.

    Args:
        x: ``[B * T, K]``. old: ``[B * T, F_i]``; both may have gaps between tokens. new: the same, contiguous.
        a, b, ranks, scales, first, places: as of :func:`speccompile.ops.lora.reference`.
    """
    depth, rank = a[0].shape[1:]
    rows, wide = places.shape[0], torch.float32 in (x.dtype, a[0].dtype)
    width = x.shape[0] // rows
    tiles = rows * -(-width // ROWS)
    ranks_of_tile = triton.next_power_of_2(rank)
    columns = max(32, min(128, 4096 // ranks_of_tile))
    parts = parts_of([output.shape[1] for output in old], columns, tiles)
    arguments: dict[str, object] = {}
    for number in range(LINEARS):
        # No program has a linear that is not there.
        own = number if number < len(old) else 0
        arguments |= {
            f"old_{number}": old[own],
            f"new_{number}": new[own],
            f"a_{number}": a[own],
            f"b_{number}": b[own],
            f"stride_{number}": old[own].stride(0),
            f"features_{number}": old[own].shape[1],
            f"parts_{number}": parts[number] if number < len(old) else 0,
        }
    arguments |= {
        "x": x,
        "ranks": ranks,
        "scales": scales,
        "places": places,
        "width": width,
        "first": first,
        "x_stride": x.stride(0),
        "OF_LAYER": ranks.shape[1],
        "DEPTH": depth,
        "RANK": rank,
        "RANKS": ranks_of_tile,
        "ROWS": ROWS,
        "SPLITS": SPLITS,
        "DEPTHS": max(16, min(128, 2048 // ranks_of_tile) // (4 if wide else 1)),
        "COLUMNS": columns,
        "CHUNK": min(CHUNK, ranks_of_tile),
        "SIDE_BY_SIDE": SIDE_BY_SIDE,
    }
    return Launch(add_adapters, (sum(parts), tiles), arguments, warps=4 if ranks_of_tile <= 64 else 8, stages=3)


def parts_of(features: Sequence[int], columns: int, tiles: int) -> list[int]:
    """Programs of each linear for each of ``tiles`` tiles of tokens, by its share of the outputs."""
    most = [-(-count // columns) for count in features]
    wanted = -(-PROGRAMS // tiles)
    return [max(1, min(count, wanted * count // sum(most))) for count in most]


def lora(
    x: torch.Tensor,
    outputs: list[torch.Tensor],
    a: list[torch.Tensor],
    b: list[torch.Tensor],
    ranks: torch.Tensor,
    scales: torch.Tensor,
    first: int,
    places: torch.Tensor,
) -> list[torch.Tensor]:
    """:func:`speccompile.ops.lora.reference` on CUDA."""
    flat = _by_token(x)
    old = [_by_token(output) for output in outputs]
    results = [output.new_empty(output.shape) for output in outputs]
    new = [result.view(-1, result.shape[-1]) for result in results]
    launches = [
        lora_launch(
            flat,
            old[start : start + LINEARS],
            new[start : start + LINEARS],
            a[start : start + LINEARS],
            b[start : start + LINEARS],
            ranks,
            scales,
            first + start,
            places,
        )
        for start in range(0, len(outputs), LINEARS)
    ]
    run_all(launches, x)
    return results


def _by_token(tensor: torch.Tensor) -> torch.Tensor:
    """``[B * T, F]``: a view also of a part of a wider tensor."""
    flat = tensor.flatten(0, -2)
    return flat if flat.stride(-1) == 1 else flat.contiguous()

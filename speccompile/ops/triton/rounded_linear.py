"""Linears and embeddings over int8 and int4 weights on CUDA.

They read the packs that the CPU's kernels read, and compute the same model: inputs are rounded row by row, a part's sum
is one of integers, and parts and groups are added in order. A tile has as many rows whatever the width, so a row's bits
depend on no other row. Compared with its definition on an H200; no whole step has run there.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from speccompile.ops.triton.launch import Launch, run_all

#: Outputs of a packed block, inputs that are rounded together, and rows of a tile (the least that ``tl.dot`` accepts).
COLUMNS, GROUP, ROWS = 32, 64, 16
#: Linears of a launch: queries, keys and values.
LINEARS = 3
#: Values of an embedding that a program reads at once.
VALUES = 128


@triton.jit
def round_inputs(x, numbers, scales, DEPTH: tl.constexpr, GROUPS: tl.constexpr, GROUP: tl.constexpr):  # type: ignore[no-untyped-def]
    """Program (row, group): the greatest size becomes 127."""
    row, group = tl.program_id(0).to(tl.int64), tl.program_id(1)
    lane = tl.arange(0, GROUP)
    at = group * GROUP + lane
    values = tl.load(x + row * DEPTH + at, mask=at < DEPTH, other=0.0).to(tl.float32)
    # A maximum passes over what is not a number.
    broken = tl.sum((values != values).to(tl.int32), 0) > 0
    most = tl.where(broken, float("nan"), tl.max(tl.abs(values), 0))
    factor = tl.div_rn(127.0, most)
    usable = (most < float("inf")) & (factor < float("inf"))
    # To the nearest even: numbers of this size have no fraction.
    whole = (tl.where(usable, values * factor, 0.0) + 12582912.0) - 12582912.0
    tl.store(numbers + (row * GROUPS + group) * GROUP + lane, whole.to(tl.int8))
    tl.store(scales + row * GROUPS + group, tl.div_rn(most, 127.0))


@triton.jit
def packed_numbers(packed, block, k, column, GROUPS: tl.constexpr, FOUR_BITS: tl.constexpr, OFFSET: tl.constexpr):  # type: ignore[no-untyped-def]
    """Numbers of inputs ``k`` and outputs ``column`` of a block; either is broadcast."""
    if FOUR_BITS:
        byte = ((block * GROUPS * 16 + k // 4) * 16 + column % 16) * 4 + k % 4
        both = tl.load(packed + byte).to(tl.int32)
        return tl.where(column < 16, both & 15, both >> 4) - OFFSET
    byte = ((block * GROUPS * 16 + k // 4) * 32 + column) * 4 + k % 4
    return tl.load(packed + byte).to(tl.int32)


@triton.jit(do_not_specialize=["rows", "blocks_0", "blocks_1"])
def multiply_rounded(  # type: ignore[no-untyped-def]
    numbers,
    input_scales,
    packed_0,
    packed_1,
    packed_2,
    scales_0,
    scales_1,
    scales_2,
    bias_0,
    bias_1,
    bias_2,
    out_0,
    out_1,
    out_2,
    rows,
    features_0,
    features_1,
    features_2,
    blocks_0,
    blocks_1,
    GROUPS: tl.constexpr,
    PART: tl.constexpr,
    SCALE_ROWS: tl.constexpr,
    MINIMUMS: tl.constexpr,
    FOUR_BITS: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Program (block of outputs of one of three linears, tile of rows). A row of ``scales`` is for one part of the
    inputs, or for several."""
    block = tl.program_id(0).to(tl.int64)
    packed, scales, bias, out, features = packed_0, scales_0, bias_0, out_0, features_0
    if block >= blocks_0 + blocks_1:
        block -= blocks_0 + blocks_1
        packed, scales, bias, out, features = packed_2, scales_2, bias_2, out_2, features_2
    elif block >= blocks_0:
        block -= blocks_0
        packed, scales, bias, out, features = packed_1, scales_1, bias_1, out_1, features_1
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    lane, within = tl.arange(0, COLUMNS), tl.arange(0, PART)
    inputs = numbers + row.to(tl.int64)[:, None] * GROUPS * GROUP
    of_block = scales + block * SCALE_ROWS * COLUMNS * (2 if MINIMUMS else 1)
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for group in range(GROUPS):
        products = tl.zeros((ROWS, COLUMNS), tl.float32)
        for part in tl.static_range(GROUP // PART):
            k = group * GROUP + part * PART + within
            values = tl.load(inputs + k[None, :], mask=(row < rows)[:, None], other=0)
            weights = packed_numbers(
                packed, block, k[:, None], lane[None, :], GROUPS, FOUR_BITS, 0 if MINIMUMS else 8
            ).to(tl.int8)
            whole = tl.dot(values, weights, out_dtype=tl.int32).to(tl.float32)
            line = (group * (GROUP // PART) + part) * SCALE_ROWS // (GROUPS * (GROUP // PART))
            own = of_block + line * COLUMNS * (2 if MINIMUMS else 1) + lane
            products = tl.fma(whole, tl.load(own).to(tl.float32)[None, :] + tl.zeros_like(whole), products)
            if MINIMUMS:
                below = tl.load(own + COLUMNS).to(tl.float32)[None, :] + tl.zeros_like(whole)
                added = tl.sum(values.to(tl.int32), 1).to(tl.float32)[:, None] + tl.zeros_like(whole)
                products = tl.fma(-added, below, products)
        of_inputs = tl.load(input_scales + row.to(tl.int64) * GROUPS + group, mask=row < rows, other=0.0)
        total = tl.fma(products, of_inputs[:, None] + tl.zeros_like(products), total)
    column = block * COLUMNS + lane
    if bias is not None:
        total += tl.load(bias + column, mask=column < features, other=0.0).to(tl.float32)[None, :]
    results = out + row.to(tl.int64)[:, None] * features + column[None, :]
    tl.store(results, total.to(out.dtype.element_ty), mask=(row < rows)[:, None] & (column < features)[None, :])


@triton.jit
def read_rounded_rows(  # type: ignore[no-untyped-def]
    packed,
    scales,
    ids,
    out,
    DEPTH: tl.constexpr,
    GROUPS: tl.constexpr,
    SCALE_ROWS: tl.constexpr,
    MINIMUMS: tl.constexpr,
    FOUR_BITS: tl.constexpr,
    GROUP: tl.constexpr,
    COLUMNS: tl.constexpr,
    VALUES: tl.constexpr,
):
    """Program (id, run of values)."""
    place = tl.program_id(0).to(tl.int64)
    row = tl.load(ids + place)
    block, column = row // COLUMNS, row % COLUMNS
    k = tl.program_id(1) * VALUES + tl.arange(0, VALUES)
    there = k < DEPTH
    k = tl.minimum(k, DEPTH - 1)
    number = packed_numbers(packed, block, k, column, GROUPS, FOUR_BITS, 0 if MINIMUMS else 8).to(tl.float32)
    line = block * SCALE_ROWS + k * SCALE_ROWS // (GROUPS * GROUP)
    own = scales + line * COLUMNS * (2 if MINIMUMS else 1) + column
    value = number * tl.load(own).to(tl.float32)
    if MINIMUMS:
        value -= tl.load(own + COLUMNS).to(tl.float32)
    tl.store(out + place * DEPTH + k, value, mask=there)


def _sizes(packed: torch.Tensor, scales: torch.Tensor) -> dict[str, object]:
    """Sizes of a pack, for both kernels."""
    return {
        "GROUPS": packed.shape[1] // 16,
        "SCALE_ROWS": scales.shape[1],
        "MINIMUMS": scales.dim() == 4,
        "FOUR_BITS": packed.dtype == torch.uint8,
        "GROUP": GROUP,
        "COLUMNS": COLUMNS,
    }


def round_launch(x: torch.Tensor, numbers: torch.Tensor, scales: torch.Tensor) -> Launch:
    """``x`` ``[rows, depth]`` to int8 ``[rows, groups, 64]`` and float32 ``[rows, groups]``."""
    rows, groups, _ = numbers.shape
    arguments = {"x": x, "numbers": numbers, "scales": scales, "DEPTH": x.shape[1], "GROUPS": groups, "GROUP": GROUP}
    return Launch(round_inputs, (rows, groups), arguments, warps=1)


def multiply_launch(
    numbers: torch.Tensor,
    input_scales: torch.Tensor,
    packed: Sequence[torch.Tensor],
    scales: Sequence[torch.Tensor],
    biases: Sequence[torch.Tensor | None],
    out: Sequence[torch.Tensor],
) -> Launch:
    """One launch for at most three linears, whose packs differ only in ``features``; ``out[i]`` is ``[rows, F_i]``."""
    sizes = _sizes(packed[0], scales[0])
    rows = numbers.shape[0]
    depth = GROUP * packed[0].shape[1] // 16
    # The part of a group that has one scale; four bits have at least two.
    part = min(GROUP // 2 if sizes["FOUR_BITS"] else GROUP, depth // scales[0].shape[1])
    blocks = [weight.shape[0] for weight in packed]
    arguments: dict[str, object] = {}
    for number in range(LINEARS):
        # No program has a linear that is not there.
        own = number if number < len(packed) else 0
        arguments |= {
            f"packed_{number}": packed[own],
            f"scales_{number}": scales[own],
            f"bias_{number}": biases[own],
            f"out_{number}": out[own],
            f"features_{number}": out[own].shape[1],
        }
    arguments |= {
        "numbers": numbers,
        "input_scales": input_scales,
        "rows": rows,
        "blocks_0": blocks[0],
        "blocks_1": sum(blocks[1:2]),
        "PART": part,
        "ROWS": ROWS,
    }
    return Launch(multiply_rounded, (sum(blocks), -(-rows // ROWS)), arguments | sizes, stages=3)


def runs_of(packed: Sequence[torch.Tensor], scales: Sequence[torch.Tensor]) -> list[slice]:
    """Linears that one launch multiplies: at most three that follow one another, with packs of the same sizes."""
    runs: list[slice] = []
    for number, sizes in enumerate(map(_sizes, packed, scales)):
        last = runs[-1] if runs else None
        if last is None or number - last.start == LINEARS or _sizes(packed[last.start], scales[last.start]) != sizes:
            runs.append(slice(number, number + 1))
        else:
            runs[-1] = slice(last.start, number + 1)
    return runs


def rounded_linears(
    x: torch.Tensor,
    packed: list[torch.Tensor],
    scales: list[torch.Tensor],
    biases: list[torch.Tensor],
    features: list[int],
) -> list[torch.Tensor]:
    """``int8_linears`` and ``int4_linears`` of :mod:`speccompile.ops.native` on CUDA."""
    flat = x.reshape(-1, x.shape[-1]).contiguous()
    rows, groups = flat.shape[0], packed[0].shape[1] // 16
    numbers = torch.empty((rows, groups, GROUP), dtype=torch.int8, device=x.device)
    input_scales = torch.empty((rows, groups), dtype=torch.float32, device=x.device)
    results = [x.new_empty((*x.shape[:-1], count)) for count in features]
    out = [result.view(rows, -1) for result in results]
    given: list[torch.Tensor | None] = [bias.contiguous() for bias in biases]
    given = given or [None] * len(features)
    launches = [round_launch(flat, numbers, input_scales)]
    for run in runs_of(packed, scales):
        launches.append(multiply_launch(numbers, input_scales, packed[run], scales[run], given[run], out[run]))
    run_all(launches, x)
    return results


def rounded_linear(
    x: torch.Tensor, packed: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None, features: int
) -> torch.Tensor:
    """``int8_linear`` and ``int4_linear`` on CUDA."""
    return rounded_linears(x, [packed], [scales], [] if bias is None else [bias], [features])[0]


def embedding_launch(packed: torch.Tensor, scales: torch.Tensor, ids: torch.Tensor, out: torch.Tensor) -> Launch:
    """``out`` float32 ``[ids, depth]``."""
    depth = out.shape[-1]
    arguments = {"packed": packed, "scales": scales, "ids": ids, "out": out, "DEPTH": depth, "VALUES": VALUES}
    return Launch(read_rounded_rows, (ids.numel(), -(-depth // VALUES)), arguments | _sizes(packed, scales))


def rounded_embedding(packed: torch.Tensor, scales: torch.Tensor, ids: torch.Tensor, depth: int) -> torch.Tensor:
    """``int8_embedding`` and ``int4_embedding`` on CUDA. Ids are not checked: that would wait for the GPU."""
    ids = ids.contiguous()
    out = torch.empty((*ids.shape, depth), dtype=torch.float32, device=packed.device)
    run_all([embedding_launch(packed, scales, ids, out)], packed)
    return out

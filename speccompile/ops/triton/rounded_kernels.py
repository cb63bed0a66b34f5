"""Kernels of linears and embeddings over int8, int4 and fp4 weights, which read the packs that the CPU's kernels read.

A word is four numbers of consecutive inputs: of one output (int8), or of two (int4: the low halves of its bytes and the
high ones). A group is the 64 inputs that are rounded together; a part of it is the inputs that share a scale.
"""

# Tuples of tensors grow.
# mypy: disable-error-code="assignment"

from __future__ import annotations

import triton
import triton.language as tl


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
def dot_of_bytes(one, other, total, ASSEMBLY: tl.constexpr):  # type: ignore[no-untyped-def]
    """int32 ``total`` plus the products of four signed bytes. Triton's interpreter runs no assembly."""
    if ASSEMBLY:
        total = tl.inline_asm_elementwise(
            "dp4a.s32.s32 $0, $1, $2, $3;", "=r,r,r,r", [one, other, total], dtype=tl.int32, is_pure=True, pack=1
        )
    else:
        shift = (24 - 8 * tl.arange(0, 4))[None, None, :]
        total += tl.sum(((one[:, :, None] << shift) >> 24) * ((other[:, :, None] << shift) >> 24), 2)
    return total


@triton.jit
def decoded(bits):  # type: ignore[no-untyped-def]
    """Four numbers of E2M1, doubled, plus 12, of 0 to 15 in each byte. From 4 on they are 4, 6, 8, 12."""
    lowest, middle = bits & 0x01010101, (bits >> 1) & 0x01010101
    high, sign = (bits >> 2) & 0x01010101, (bits >> 3) & 0x01010101
    both = high & middle
    size = (bits & 0x07070707) + (high & lowest) + 2 * (both + (both & lowest))
    # No byte is below zero: none borrows from the next one.
    return 0x0C0C0C0C + size - 2 * (size & (sign * 255))


@triton.jit
def store_rows(totals, bias, out, first_column, first_row, rows, features, LANES: tl.constexpr, ROWS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Add ``totals``, for each row float32 ``[groups, LANES]``, over groups, and store the sums. Rows are filled up to
    eight: the order of a sum depends on the layout of the tensor, which is then the same for any number of rows."""
    all_totals = totals
    for _ in tl.static_range(8 - ROWS):
        all_totals += (tl.zeros_like(totals[0]),)
    even = tl.join(tl.join(all_totals[0], all_totals[4]), tl.join(all_totals[2], all_totals[6]))
    odd = tl.join(tl.join(all_totals[1], all_totals[5]), tl.join(all_totals[3], all_totals[7]))
    total = tl.reshape(tl.sum(tl.join(even, odd), 0), (LANES, 8))
    column, row = first_column + tl.arange(0, LANES), first_row + tl.arange(0, 8)
    if bias is not None:
        total += tl.load(bias + column, mask=column < features, other=0.0).to(tl.float32)[:, None]
    results = out + row.to(tl.int64)[None, :] * features + column[:, None]
    tl.store(results, total.to(out.dtype.element_ty), mask=(row < rows)[None, :] & (column < features)[:, None])


@triton.jit
def zeros(COUNT: tl.constexpr, SIZE: tl.constexpr, LANES: tl.constexpr, dtype: tl.constexpr):  # type: ignore[no-untyped-def]
    """``COUNT`` tensors ``[SIZE, LANES]``."""
    tensors = ()
    for _ in tl.static_range(COUNT):
        tensors += (tl.zeros((SIZE, LANES), dtype),)
    return tensors


@triton.jit(do_not_specialize=["rows", "blocks_0", "blocks_1"])
def multiply_rounded(  # type: ignore[no-untyped-def]
    inputs,
    input_scales,
    words_0,
    words_1,
    words_2,
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
    PARTS: tl.constexpr,
    SCALE_ROWS: tl.constexpr,
    MINIMUMS: tl.constexpr,
    HALVES: tl.constexpr,
    CODED: tl.constexpr,
    TOGETHER: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    ASSEMBLY: tl.constexpr,
):
    """Program (tile of rows, block of outputs of one of three linears): ``TOGETHER`` groups at a time. A thread adds
    the products of a part, for one output, as integers.

    ``inputs``: words ``[rows, GROUPS, 16]``. ``words_i``: ``[blocks, GROUPS, 16, COLUMNS / HALVES]``; int4 has two
    halves. ``scales_i``: ``[blocks, SCALE_ROWS, COLUMNS]``, or ``[blocks, SCALE_ROWS, 2, COLUMNS]`` with minimums; a
    row of them is for one part of the inputs, or for several.
    """
    block = tl.program_id(1).to(tl.int64)
    words, scales, bias, out, features = words_0, scales_0, bias_0, out_0, features_0
    if block >= blocks_0 + blocks_1:
        block -= blocks_0 + blocks_1
        words, scales, bias, out, features = words_2, scales_2, bias_2, out_2, features_2
    elif block >= blocks_0:
        block -= blocks_0
        words, scales, bias, out, features = words_1, scales_1, bias_1, out_1, features_1
    LANES: tl.constexpr = COLUMNS // HALVES
    WORDS: tl.constexpr = 16 // PARTS
    LINE: tl.constexpr = COLUMNS * (2 if MINIMUMS else 1)
    first_row = tl.program_id(0) * ROWS
    lane = tl.arange(0, LANES)[None, :]
    words += block * (GROUPS * 16 * LANES) + lane
    scales += block * (SCALE_ROWS * LINE) + lane
    totals = zeros(ROWS * HALVES, TOGETHER, LANES, tl.float32)
    for first in range(0, GROUPS, TOGETHER):
        group = first + tl.arange(0, TOGETHER)[:, None]
        inside = group < GROUPS
        # Past the end, the last group is read again, and multiplied by zero.
        group = tl.minimum(group, GROUPS - 1)
        products = zeros(ROWS * HALVES, TOGETHER, LANES, tl.float32)
        for part in tl.static_range(PARTS):
            sums = zeros(ROWS * HALVES, TOGETHER, LANES, tl.int32)
            of_inputs = zeros(ROWS, TOGETHER, 1, tl.int32)
            for place in tl.static_range(WORDS):
                word = part * WORDS + place
                weights = tl.load(words + (group * 16 + word) * LANES)
                new_sums, new_of_inputs = (), ()
                for row in tl.static_range(ROWS):
                    line = tl.minimum(first_row + row, rows - 1).to(tl.int64) * GROUPS + group
                    values = tl.load(inputs + line * 16 + word)
                    for half in tl.static_range(HALVES):
                        numbers = weights
                        if HALVES == 2:
                            numbers = (weights >> (4 * half)) & 0x0F0F0F0F
                        if CODED:
                            numbers = decoded(numbers)
                        new_sums += (dot_of_bytes(numbers, values, sums[row * HALVES + half], ASSEMBLY),)
                    ones = tl.full((TOGETHER, 1), 0x01010101, tl.int32)
                    new_of_inputs += (dot_of_bytes(ones, values, of_inputs[row], ASSEMBLY),)
                sums, of_inputs = new_sums, new_of_inputs
            new_products = ()
            for row in tl.static_range(ROWS):
                for half in tl.static_range(HALVES):
                    at = scales + (group * PARTS + part) * SCALE_ROWS // (GROUPS * PARTS) * LINE + half * LANES
                    product = products[row * HALVES + half]
                    whole = sums[row * HALVES + half]
                    if HALVES == 2 and not MINIMUMS:
                        whole -= (12 if CODED else 8) * of_inputs[row]
                    product = tl.fma(whole.to(tl.float32), tl.load(at).to(tl.float32), product)
                    if MINIMUMS:
                        added = tl.zeros_like(product) - of_inputs[row].to(tl.float32)
                        product = tl.fma(added, tl.load(at + COLUMNS).to(tl.float32), product)
                    new_products += (product,)
            products = new_products
        new_totals = ()
        for row in tl.static_range(ROWS):
            line = tl.minimum(first_row + row, rows - 1).to(tl.int64) * GROUPS + group
            unit = tl.where(inside, tl.load(input_scales + line), 0.0) + tl.zeros((TOGETHER, LANES), tl.float32)
            for half in tl.static_range(HALVES):
                new_totals += (tl.fma(products[row * HALVES + half], unit, totals[row * HALVES + half]),)
        totals = new_totals
    for half in tl.static_range(HALVES):
        own = ()
        for row in tl.static_range(ROWS):
            own += (totals[row * HALVES + half],)
        store_rows(own, bias, out, block * COLUMNS + half * LANES, first_row, rows, features, LANES, ROWS)


@triton.jit
def packed_numbers(  # type: ignore[no-untyped-def]
    packed,
    block,
    k,
    column,
    GROUPS: tl.constexpr,
    FOUR_BITS: tl.constexpr,
    OFFSET: tl.constexpr,
    CODED: tl.constexpr,
):
    """Numbers of inputs ``k`` and outputs ``column`` of a block; either is broadcast."""
    if FOUR_BITS:
        byte = ((block * GROUPS * 16 + k // 4) * 16 + column % 16) * 4 + k % 4
        both = tl.load(packed + byte).to(tl.int32)
        number = tl.where(column < 16, both & 15, both >> 4)
        if CODED:
            number = decoded(number) & 255
        return number - OFFSET
    byte = ((block * GROUPS * 16 + k // 4) * 32 + column) * 4 + k % 4
    return tl.load(packed + byte).to(tl.int32)


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
    HALVES: tl.constexpr,
    CODED: tl.constexpr,
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
    OFFSET: tl.constexpr = 12 if CODED else 0 if MINIMUMS else 8
    number = packed_numbers(packed, block, k, column, GROUPS, HALVES == 2, OFFSET, CODED).to(tl.float32)
    line = block * SCALE_ROWS + k * SCALE_ROWS // (GROUPS * 64)
    own = scales + line * COLUMNS * (2 if MINIMUMS else 1) + column
    value = number * tl.load(own).to(tl.float32)
    if MINIMUMS:
        value -= tl.load(own + COLUMNS).to(tl.float32)
    tl.store(out + place * DEPTH + k, value, mask=there)

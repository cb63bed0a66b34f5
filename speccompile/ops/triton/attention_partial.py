"""The first attention kernel: a tile of queries over a fixed stretch of the cache, under a running softmax."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from speccompile.ops.triton.attention_call import LOG2_E, AttentionCall
from speccompile.ops.triton.attention_plan import AttentionPlan, power_of_2
from speccompile.ops.triton.attention_visible import NOTHING, first_seen, seen_nodes
from speccompile.ops.triton.launch import Launch


@triton.jit
def _tanh(x):  # type: ignore[no-untyped-def]
    shrunk = tl.exp2(-2.8853900817779268 * tl.abs(x))  # exp(-2|x|)
    size = (1 - shrunk) / (1 + shrunk)
    return tl.where(x < 0, -size, size)


@triton.jit
def _load_rows(pointers, rows, columns, SIZE: tl.constexpr, PADDED: tl.constexpr):  # type: ignore[no-untyped-def]
    # A mask that is true throughout, but not provably so, would split the loads.
    if SIZE == PADDED:
        return tl.load(pointers, mask=rows[:, None], other=0.0)
    else:
        return tl.load(pointers, mask=rows[:, None] & (columns < SIZE)[None, :], other=0.0)


@triton.jit
def _load_cached(  # type: ignore[no-untyped-def]
    block,
    places,
    columns,
    stride,
    rows,
    dtype: tl.constexpr,
    SIZE: tl.constexpr,
    PADDED: tl.constexpr,
    KEYS: tl.constexpr,
):
    """Keys or values ``[keys, PADDED]`` of a block in ``dtype``. Rows of 8 bits are those of ``ops/kv_rows.py``."""
    at = block + places[:, None] * stride
    found = _load_rows(at + columns[None, :], rows, columns, SIZE, PADDED)
    if block.dtype.element_ty == tl.int8:
        GROUP: tl.constexpr = min(32, PADDED)
        GROUPS: tl.constexpr = PADDED // GROUP
        group = tl.arange(0, GROUPS)
        pointers = (at + SIZE).to(tl.pointer_type(tl.float16)) + group[None, :]
        scales = _load_rows(pointers, rows, group, (SIZE + GROUP - 1) // GROUP, GROUPS).to(tl.float32)
        widened = found.to(tl.float32).reshape(KEYS, GROUPS, GROUP) * scales[:, :, None]
        return widened.reshape(KEYS, PADDED).to(dtype)
    else:
        return found.to(dtype)


@triton.jit
def _attend(  # type: ignore[no-untyped-def]
    block,
    top,
    total,
    out,
    queries,
    k_cache,
    v_cache,
    k_place,
    v_place,
    pages,
    k_slot,
    v_slot,
    page_size,
    scale,
    cap,
    slopes,
    tile_first,
    tile_stop,
    first,
    own,
    place,
    root,
    width,
    positions,
    parents,
    DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    PADDED_VALUE_DIM: tl.constexpr,
    KEYS: tl.constexpr,
    WIDEN: tl.constexpr,
):
    """One block of keys: greatest score, sum of weights and weighted values so far become those with it."""
    start = block * KEYS
    within = tl.arange(0, KEYS)
    key = start + within
    live = (key >= tile_first) & (key < tile_stop)
    feature = tl.arange(0, PADDED_DIM)
    # A block lies in one page.
    first_place = tl.cast(start, tl.int64)
    if pages is not None:
        page = tl.load(pages + start // page_size)
        first_place = tl.cast(start % page_size, tl.int64)
        k_cache += page * k_slot
        v_cache += page * v_slot
    k_block = k_cache + first_place * k_place
    keys = _load_cached(k_block, within, feature, k_place, live, queries.dtype, DIM, PADDED_DIM, KEYS)
    scores = tl.dot(queries, tl.trans(keys), input_precision="ieee") * scale
    if cap is not None:
        scores = _tanh(scores) * cap
    if slopes is not None:
        position = key
        if parents is not None:
            node = key - root
            of_node = tl.load(positions + node, mask=(node >= 0) & (node < width), other=0).to(tl.int32)
            position = tl.where(node >= 0, of_node, key)
        scores += slopes[:, None] * (position[None, :] - own[:, None]).to(tl.float32)

    visible = (key[None, :] >= first[:, None]) & (key[None, :] <= own[:, None])
    if parents is not None:
        # After the committed tokens stand the step's own, each at its place, which is not its position.
        visible = visible & (key < root)[None, :]
        visible = visible | seen_nodes(key - root, place, first, positions, parents, width)
    scores = tl.where(visible & live[None, :], scores, float("-inf"))

    higher = tl.maximum(top, tl.max(scores, 1))
    shrink = tl.exp2(top - higher)
    weights = tl.exp2(scores - higher[:, None])
    total = total * shrink + tl.sum(weights, 1)
    value = tl.arange(0, PADDED_VALUE_DIM)
    v_block = v_cache + first_place * v_place
    values = _load_cached(v_block, within, value, v_place, live, queries.dtype, VALUE_DIM, PADDED_VALUE_DIM, KEYS)
    if WIDEN and v_cache.dtype.element_ty != tl.int8:
        weights = weights.to(v_cache.dtype.element_ty)
    weights = weights.to(values.dtype)
    out = tl.dot(weights, values, out * shrink[:, None], input_precision="ieee")
    return higher, total, out


@triton.jit(do_not_specialize=["width"])
def partial_attention(  # type: ignore[no-untyped-def]
    q,
    k_cache,
    v_cache,
    slots,
    pages,
    positions,
    parents,
    sinks,
    workspace,
    out,
    q_row,
    q_place,
    q_head,
    k_slot,
    k_place,
    k_group,
    v_slot,
    v_place,
    v_group,
    scale,
    cap,
    width,
    capacity,
    page_size,
    table,
    splits,
    GROUPS: tl.constexpr,
    PER_GROUP: tl.constexpr,
    DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    PADDED_VALUE_DIM: tl.constexpr,
    WINDOW: tl.constexpr,
    CHUNK: tl.constexpr,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
    BLOCKS: tl.constexpr,
    TWO_LOOPS: tl.constexpr,
    ALIBI: tl.constexpr,
    WIDEN: tl.constexpr,
):
    """Program (tile, group + GROUPS * split, row): its queries over blocks ``split * BLOCKS ...`` of the row's slot.

    Scores are in units of log 2: ``scale`` includes that factor, or ``cap`` if there is a soft cap. Without a
    ``workspace`` there is one split, and results go to ``out``. ``ALIBI`` is the p of ``alibi_slopes``, or None.
    """
    group = tl.program_id(1) % GROUPS
    split = tl.program_id(1) // GROUPS
    row = tl.program_id(2).to(tl.int64)
    query = tl.program_id(0) * QUERIES + tl.arange(0, QUERIES)
    place = query // PER_GROUP
    head = group * PER_GROUP + query % PER_GROUP
    real = place < width
    positions += row * width
    own = tl.load(positions + place, mask=real, other=-1).to(tl.int32)
    first = first_seen(own, WINDOW, CHUNK)

    # What of the cache any query of the tile sees.
    tile_first = tl.min(tl.where(real, first, capacity))
    tile_stop = tl.max(own) + 1
    root = tile_stop
    if parents is not None:
        root = tl.load(positions).to(tl.int32)
        tile_first = tl.minimum(tile_first, root)
        tile_stop = root + width
    tile_stop = tl.minimum(tile_stop, capacity)
    begin = tl.maximum(split * BLOCKS, tile_first // KEYS)
    end = tl.minimum(split * BLOCKS + BLOCKS, tl.cdiv(tile_stop, KEYS))
    if begin >= end:
        return

    feature = tl.arange(0, PADDED_DIM)
    value = tl.arange(0, PADDED_VALUE_DIM)
    q += row * q_row + place[:, None] * q_place + head[:, None] * q_head + feature[None, :]
    queries = _load_rows(q, real, feature, DIM, PADDED_DIM)
    slot = tl.load(slots + row)
    k_cache += group * k_group
    v_cache += group * v_group
    if pages is not None:
        pages += slot * table
    else:
        k_cache += slot * k_slot
        v_cache += slot * v_slot
    if WIDEN:
        queries = queries.to(tl.float32)
    slopes = None
    if ALIBI is not None:
        half = tl.where(head < ALIBI, 2 * head + 2, 2 * (head - ALIBI) + 1).to(tl.float32)
        slopes = tl.exp2(half * (-4.0 / ALIBI)) * 1.4426950408889634  # log2(e)

    top = tl.full((QUERIES,), NOTHING, tl.float32)
    total = tl.zeros((QUERIES,), tl.float32)
    part = tl.zeros((QUERIES, PADDED_VALUE_DIM), tl.float32)
    # Blocks with nodes of a tree have their own loop: with another one inside it is not pipelined. In float32 the
    # registers do not suffice for two.
    nodes = end
    if parents is not None:
        nodes = begin
        if TWO_LOOPS:
            nodes = tl.minimum(tl.maximum(root // KEYS, begin), end)
    for block in range(begin, nodes):
        top, total, part = _attend(
            block, top, total, part, queries, k_cache, v_cache, k_place, v_place,
            pages, k_slot, v_slot, page_size, scale, cap, slopes,
            tile_first, tile_stop, first, own, place, root, width, positions, None,
            DIM, VALUE_DIM, PADDED_DIM, PADDED_VALUE_DIM, KEYS, WIDEN,
        )  # fmt: skip
    if parents is not None:
        for block in range(nodes, end):
            top, total, part = _attend(
                block, top, total, part, queries, k_cache, v_cache, k_place, v_place,
            pages, k_slot, v_slot, page_size, scale, cap, slopes,
                tile_first, tile_stop, first, own, place, root, width, positions, parents + row * width,
                DIM, VALUE_DIM, PADDED_DIM, PADDED_VALUE_DIM, KEYS, WIDEN,
            )  # fmt: skip

    HEADS: tl.constexpr = GROUPS * PER_GROUP
    at = (row * splits + split) * width * HEADS + place * HEADS + head
    kept = real[:, None] & (value < VALUE_DIM)[None, :]
    if workspace is None:
        if sinks is not None:
            sink = tl.load(sinks + head).to(tl.float32) * 1.4426950408889634  # log2(e)
            highest = tl.maximum(top, sink)
            weight = tl.exp2(top - highest)
            part *= weight[:, None]
            total = total * weight + tl.exp2(sink - highest)
        result = part / total[:, None]
        tl.store(out + at[:, None] * VALUE_DIM + value[None, :], result.to(out.dtype.element_ty), mask=kept)
    else:
        all_queries = tl.num_programs(2).to(tl.int64) * splits * width * HEADS
        tl.store(workspace + at[:, None] * VALUE_DIM + value[None, :], part, mask=kept)
        tl.store(workspace + all_queries * VALUE_DIM + at, top, mask=real)
        tl.store(workspace + all_queries * (VALUE_DIM + 1) + at, total, mask=real)


def partial_launch(call: AttentionCall, out: torch.Tensor, workspace: torch.Tensor, plan: AttentionPlan) -> Launch:
    """Leaves partial results in ``workspace``, as :func:`partial_attention` lays them out. With one split it writes
    ``out`` ``[B, T, H, Dv]``, contiguous, and does not need a workspace."""
    q, k_cache, v_cache = call.q, call.k_cache, call.v_cache
    rows, _, heads, groups, dim, value_dim, capacity = call.sizes
    two_loops = q.dtype.itemsize == 2
    return Launch(
        partial_attention,
        (plan.tiles, groups * plan.splits, rows),
        {
            **call.for_both(),
            "sinks": call.sinks if plan.splits == 1 else None,
            "workspace": None if plan.splits == 1 else workspace,
            "out": out if plan.splits == 1 else None,
            "splits": plan.splits,
            "q": q,
            "k_cache": k_cache,
            "v_cache": v_cache,
            "slots": call.slots,
            "pages": call.pages,
            "page_size": k_cache.shape[1],
            "table": 0 if call.pages is None else call.pages.shape[1],
            **dict(zip(("q_row", "q_place", "q_head"), q.stride(), strict=False)),
            **dict(zip(("k_slot", "k_place", "k_group"), k_cache.stride(), strict=False)),
            **dict(zip(("v_slot", "v_place", "v_group"), v_cache.stride(), strict=False)),
            "scale": call.scale * LOG2_E if call.softcap is None else call.scale / call.softcap,
            "cap": None if call.softcap is None else call.softcap * LOG2_E,
            "capacity": capacity,
            "GROUPS": groups,
            "PER_GROUP": heads // groups,
            "DIM": dim,
            "VALUE_DIM": value_dim,
            # tl.dot reduces over 16 numbers at least.
            "PADDED_DIM": max(16, power_of_2(dim)),
            "PADDED_VALUE_DIM": max(16, power_of_2(value_dim)),
            "QUERIES": plan.queries,
            "KEYS": plan.keys,
            "BLOCKS": plan.blocks,
            "TWO_LOOPS": two_loops,
            "ALIBI": 1 << (heads.bit_length() - 1) if call.alibi else None,
            # The interpreter multiplies bfloat16 as the integers that it keeps it in.
            "WIDEN": triton.knobs.runtime.interpret and q.dtype is torch.bfloat16,
        },
        plan.warps,
        plan.stages,
        # By default ptxas limits this kernel to 128 registers, which lets two programs fit, and spills.
        most_registers=255 if call.parents is not None and two_loops and plan.warps == 8 else None,
    )

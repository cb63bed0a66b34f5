"""Attention over the KV arena on CUDA: split over the cache, the query heads of a KV head packed into one product.

After Dao et al., "Flash-Decoding for long-context inference" (2023). Two kernels: each program of the first takes a
tile of queries over a fixed stretch of the cache and leaves partial results in a workspace, the second combines them.

The order of reduction. Blocks of keys, and the stretches that splits cover, begin at fixed places of the cache,
whatever is live. A block or a split that a query sees nothing of adds 0 and multiplies by 1. So with a plan of
``fixed_order`` the order of a query's reduction depends on its own position alone.
The same machine code serves every width: what is multiplied and then added is rounded once or twice as the compiler
sees fit, and another version of a kernel might differ in that.

Cost follows the true length: positions are read on the device, and a program whose stretch no query of its tile sees
returns at once. What is not live is never loaded.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl

from speccompile.lowering.ops.attention import refuse_sizes
from speccompile.lowering.triton.attention_plan import AttentionPlan, plan_attention, power_of_2, workspace_size
from speccompile.lowering.triton.launch import Launch, run_all

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
LOG2_E = math.log2(math.e)
# Values of one query that a program of the second kernel combines.
SLICE = 64

# Less than any score: a maximum that nothing has been seen for. Finite, since -inf - -inf is no number.
NOTHING = tl.constexpr(-1e38)


@triton.jit
def _first_seen(own, WINDOW: tl.constexpr, CHUNK: tl.constexpr):  # type: ignore[no-untyped-def]
    """The first position that queries at positions ``own`` see."""
    first = own * 0
    if WINDOW is not None:
        first = tl.maximum(first, own - (WINDOW - 1))
    if CHUNK is not None:
        first = tl.maximum(first, own - own % CHUNK)
    return first


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
def _on_path(node, place, first, positions, parents, width):  # type: ignore[no-untyped-def]
    """Which nodes (``[KEYS]``, the root is 0) queries of nodes ``place`` (``[QUERIES]``) see: ancestors and itself."""
    within = (node >= 0) & (node < width)
    position = tl.load(positions + node, mask=within, other=-1).to(tl.int32)
    ancestor = place
    on_path = place[:, None] == node[None, :]
    for _ in range(1, width):
        ancestor = tl.load(parents + ancestor, mask=(ancestor >= 0) & (ancestor < width), other=-1).to(tl.int32)
        on_path = on_path | (ancestor[:, None] == node[None, :])
    return on_path & within[None, :] & (position[None, :] >= first[:, None])


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
    scale,
    cap,
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
    k_block = k_cache + tl.cast(start, tl.int64) * k_place
    keys = _load_rows(k_block + within[:, None] * k_place + feature[None, :], live, feature, DIM, PADDED_DIM)
    if WIDEN:
        keys = keys.to(tl.float32)
    scores = tl.dot(queries, tl.trans(keys), input_precision="ieee") * scale
    if cap is not None:
        scores = _tanh(scores) * cap

    visible = (key[None, :] >= first[:, None]) & (key[None, :] <= own[:, None])
    if parents is not None:
        # Behind the committed tokens stand the step's own, each at its place, which is not its position.
        visible = visible & (key < root)[None, :]
        visible = visible | _on_path(key - root, place, first, positions, parents, width)
    scores = tl.where(visible & live[None, :], scores, float("-inf"))

    higher = tl.maximum(top, tl.max(scores, 1))
    shrink = tl.exp2(top - higher)
    weights = tl.exp2(scores - higher[:, None])
    total = total * shrink + tl.sum(weights, 1)
    value = tl.arange(0, PADDED_VALUE_DIM)
    v_block = v_cache + tl.cast(start, tl.int64) * v_place
    values = _load_rows(v_block + within[:, None] * v_place + value[None, :], live, value, VALUE_DIM, PADDED_VALUE_DIM)
    weights = weights.to(values.dtype)
    if WIDEN:
        weights, values = weights.to(tl.float32), values.to(tl.float32)
    out = tl.dot(weights, values, out * shrink[:, None], input_precision="ieee")
    return higher, total, out


@triton.jit(do_not_specialize=["width"])
def partial_attention(  # type: ignore[no-untyped-def]
    q,
    k_cache,
    v_cache,
    slots,
    positions,
    parents,
    workspace,
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
    WIDEN: tl.constexpr,
):
    """Program (tile, group + GROUPS * split, row): its queries over blocks ``split * BLOCKS ...`` of the row's slot.

    Scores are in units of log 2: ``scale`` includes that factor, or ``cap`` where there is a soft cap.
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
    first = _first_seen(own, WINDOW, CHUNK)

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
    k_cache += slot * k_slot + group * k_group
    v_cache += slot * v_slot + group * v_group
    if WIDEN:
        queries = queries.to(tl.float32)

    top = tl.full((QUERIES,), NOTHING, tl.float32)
    total = tl.zeros((QUERIES,), tl.float32)
    out = tl.zeros((QUERIES, PADDED_VALUE_DIM), tl.float32)
    # Blocks with nodes of a tree have a loop of their own: with another one inside it is not pipelined. In float32 the
    # registers do not suffice for two.
    nodes = end
    if parents is not None:
        nodes = begin
        if TWO_LOOPS:
            nodes = tl.minimum(tl.maximum(root // KEYS, begin), end)
    for block in range(begin, nodes):
        top, total, out = _attend(
            block, top, total, out, queries, k_cache, v_cache, k_place, v_place, scale, cap,
            tile_first, tile_stop, first, own, place, root, width, positions, None,
            DIM, VALUE_DIM, PADDED_DIM, PADDED_VALUE_DIM, KEYS, WIDEN,
        )  # fmt: skip
    if parents is not None:
        for block in range(nodes, end):
            top, total, out = _attend(
                block, top, total, out, queries, k_cache, v_cache, k_place, v_place, scale, cap,
                tile_first, tile_stop, first, own, place, root, width, positions, parents + row * width,
                DIM, VALUE_DIM, PADDED_DIM, PADDED_VALUE_DIM, KEYS, WIDEN,
            )  # fmt: skip

    HEADS: tl.constexpr = GROUPS * PER_GROUP
    all_queries = tl.num_programs(2).to(tl.int64) * splits * width * HEADS
    at = (row * splits + split) * width * HEADS + place * HEADS + head
    tl.store(
        workspace + at[:, None] * VALUE_DIM + value[None, :], out, mask=real[:, None] & (value < VALUE_DIM)[None, :]
    )
    tl.store(workspace + all_queries * VALUE_DIM + at, top, mask=real)
    tl.store(workspace + all_queries * (VALUE_DIM + 1) + at, total, mask=real)


@triton.jit(do_not_specialize=["width"])
def combine_attention(  # type: ignore[no-untyped-def]
    workspace,
    out,
    positions,
    parents,
    sinks,
    width,
    splits,
    HEADS: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    SLICE: tl.constexpr,
    WINDOW: tl.constexpr,
    CHUNK: tl.constexpr,
    SPAN: tl.constexpr,
    PADDED_SPLITS: tl.constexpr,
):
    """Program (place * HEADS + head, slice of the values, row): the weighted sum of one query's partial results.

    ``SPAN`` keys to a split. Splits that were not computed for this query weigh nothing and are not loaded, so that
    neither their number nor what stands in their part of the workspace matters.
    """
    query = tl.program_id(0)
    place = query // HEADS
    row = tl.program_id(2).to(tl.int64)
    positions += row * width
    own = tl.load(positions + place).to(tl.int32)
    first = _first_seen(own, WINDOW, CHUNK)
    last = own
    if parents is not None:
        root = tl.load(positions).to(tl.int32)
        first = tl.minimum(first, root)
        last = root + width - 1
    split = tl.arange(0, PADDED_SPLITS)
    live = (split >= first // SPAN) & (split <= last // SPAN) & (split < splits)

    all_queries = tl.num_programs(2).to(tl.int64) * splits * width * HEADS
    at = (row * splits + split) * width * HEADS + query
    top = tl.load(workspace + all_queries * VALUE_DIM + at, mask=live, other=NOTHING)
    total = tl.load(workspace + all_queries * (VALUE_DIM + 1) + at, mask=live, other=0.0)
    highest = tl.max(top)
    if sinks is not None:
        sink = tl.load(sinks + query % HEADS).to(tl.float32) * 1.4426950408889634  # log2(e)
        highest = tl.maximum(highest, sink)
    weight = tl.exp2(top - highest)
    everything = tl.sum(total * weight)
    if sinks is not None:
        everything += tl.exp2(sink - highest)

    value = tl.program_id(1) * SLICE + tl.arange(0, SLICE)
    kept = value < VALUE_DIM
    part = tl.load(workspace + at[:, None] * VALUE_DIM + value[None, :], mask=live[:, None] & kept[None, :], other=0.0)
    result = tl.sum(part * weight[:, None], 0) / everything
    out += (row * width * HEADS + query) * VALUE_DIM + value
    tl.store(out, result.to(out.dtype.element_ty), mask=kept)


def attention_launches(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slots: torch.Tensor,
    positions: torch.Tensor,
    scale: float,
    window: int | None,
    chunk: int | None,
    softcap: float | None,
    sinks: torch.Tensor | None,
    parents: torch.Tensor | None,
    out: torch.Tensor,
    workspace: torch.Tensor,
    plan: AttentionPlan,
) -> tuple[Launch, Launch]:
    """The two launches; arguments as ``speccompile.lowering.ops.attention.reference`` has them.

    Args:
        out: ``[B, T, H, Dv]``, contiguous.
        workspace: float32, at least ``workspace_size`` elements, in any state.
    """
    rows, width, heads, dim = q.shape
    capacity, groups, value_dim = v_cache.shape[1:]
    two_loops = q.dtype.itemsize == 2
    cut = {"WINDOW": window, "CHUNK": chunk}
    step = {"positions": positions, "parents": parents, "workspace": workspace, "width": width, "splits": plan.splits}
    partial = Launch(
        partial_attention,
        (plan.tiles, groups * plan.splits, rows),
        {
            **step,
            **cut,
            "q": q,
            "k_cache": k_cache,
            "v_cache": v_cache,
            "slots": slots,
            **dict(zip(("q_row", "q_place", "q_head"), q.stride(), strict=False)),
            **dict(zip(("k_slot", "k_place", "k_group"), k_cache.stride(), strict=False)),
            **dict(zip(("v_slot", "v_place", "v_group"), v_cache.stride(), strict=False)),
            "scale": scale * LOG2_E if softcap is None else scale / softcap,
            "cap": None if softcap is None else softcap * LOG2_E,
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
            # The interpreter multiplies bfloat16 as the integers that it keeps it in.
            "WIDEN": triton.knobs.runtime.interpret and q.dtype is torch.bfloat16,
        },
        plan.warps,
        plan.stages,
        # Left to itself ptxas keeps to 128 here, so that two programs fit, and spills.
        most_registers=255 if parents is not None and two_loops and plan.warps == 8 else None,
    )
    combine = Launch(
        combine_attention,
        (width * heads, -(-value_dim // SLICE), rows),
        {
            **step,
            **cut,
            "out": out,
            "sinks": sinks,
            "HEADS": heads,
            "VALUE_DIM": value_dim,
            "SLICE": min(SLICE, power_of_2(value_dim)),
            "SPAN": plan.keys * plan.blocks,
            "PADDED_SPLITS": power_of_2(plan.splits),
        },
    )
    return partial, combine


def attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slots: torch.Tensor,
    positions: torch.Tensor,
    scale: float,
    window: int | None = None,
    chunk: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    parents: torch.Tensor | None = None,
    *,
    fixed_order: bool = False,
) -> torch.Tensor:
    """``speccompile::attention`` on CUDA; arguments and result as the op's ``reference`` has them.

    The op's schema has no workspace, so that it is allocated here: under capture it lies in the graph's pool, and
    all layers share one piece of it.

    Raises:
        RuntimeError: for a dtype that there is no kernel for, and for caches whose features are not side by side.
    """
    refuse_sizes(window, chunk)
    if q.dtype not in DTYPES or k_cache.dtype is not q.dtype or v_cache.dtype is not q.dtype:
        raise RuntimeError(
            "speccompile::attention on CUDA takes queries, keys and values of one dtype, float16, bfloat16 or "
            f"float32, not {q.dtype}, {k_cache.dtype} and {v_cache.dtype}"
        )
    if k_cache.stride(-1) != 1 or v_cache.stride(-1) != 1:
        raise RuntimeError("speccompile::attention on CUDA needs caches whose last dimension is contiguous")
    rows, width, heads, dim = q.shape
    capacity, groups, value_dim = v_cache.shape[1:]
    plan = plan_attention(rows, width, heads, groups, dim, value_dim, capacity, q.dtype, fixed_order)
    out = q.new_empty((rows, width, heads, value_dim))
    workspace = q.new_empty(workspace_size(plan, rows, width, heads, value_dim), dtype=torch.float32)
    q = q if q.stride(-1) == 1 else q.contiguous()
    rest: dict[str, Any] = {
        "slots": slots.contiguous(),
        "positions": positions.contiguous(),
        "sinks": None if sinks is None else sinks.contiguous(),
        "parents": None if parents is None else parents.contiguous(),
    }
    launches = attention_launches(
        q, k_cache, v_cache, scale=scale, window=window, chunk=chunk, softcap=softcap, out=out, workspace=workspace,
        plan=plan, **rest,
    )  # fmt: skip
    run_all(launches, q)
    return out

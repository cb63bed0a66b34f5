"""Draft trees on CUDA: fitting a proposal into a tier, finding the accepted path, and moving its KV.

The ops of ``speccompile.ops.tree``. A row's tree lies in registers: a sum over a mask reads a number of a vector, and
no memory is written that is read again.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from speccompile.ops.triton.attention_plan import power_of_2
from speccompile.ops.triton.launch import Launch, run_all

#: Numbers of a place that a program moves at a time.
BLOCK = 1024


@triton.jit
def at(vector, index, place):  # type: ignore[no-untyped-def]
    """``vector[index]``, 0 where there is no such place."""
    return tl.sum(tl.where(place == index, vector, 0))


@triton.jit
def fit_tree_rows(  # type: ignore[no-untyped-def]
    tokens,
    parents,
    count,
    limit,
    drafts,
    taken_parents,
    depths,
    lens,
    proposed,
    STATIC: tl.constexpr,
    RANKS: tl.constexpr,
    NODES: tl.constexpr,
    DEPTH: tl.constexpr,
    BRANCHES: tl.constexpr,
    PADDED: tl.constexpr,
):
    """Program (row). Vectors are by proposed node, or by node of the shape; the root is 0 in both."""
    row = tl.program_id(0)
    place = tl.arange(0, PADDED)
    most = tl.minimum(tl.minimum(tl.load(count + row), tl.load(limit + row)), proposed).to(tl.int32)
    shape_parent = tl.where(place == 0, -1, 0)
    shape_depth = tl.where(place == 0, 0, 1)
    shape_rank = tl.zeros((PADDED,), tl.int32) - 1
    for number in tl.static_range(len(STATIC)):
        above = at(shape_depth, STATIC[number], place)
        shape_parent = tl.where(place == number + 1, STATIC[number], shape_parent)
        shape_rank = tl.where(place == number + 1, RANKS[number], shape_rank)
        shape_depth = tl.where(place == number + 1, above + 1, shape_depth)
    # The node in the shape of each proposed one, -1 where it was not taken, and how many children it had so far.
    taken = tl.where(place == 0, 0, -1)
    children = tl.zeros((PADDED,), tl.int32)
    found_tokens = tl.zeros((PADDED,), tl.int64) - 1
    found = tl.min(tl.zeros((PADDED,), tl.int32))
    for index in range(0, most):
        token = tl.load(tokens + row * proposed + index)
        above = tl.load(parents + row * proposed + index).to(tl.int32)
        parent = at(taken, above, place)
        rank = at(children, above, place)
        children += (place == above).to(tl.int32)
        # What is after itself is not a tree: on a CPU the op reports it.
        fits = (parent >= 0) & (token >= 0) & (above >= 0) & (above <= index)
        if len(STATIC) > 0:
            node = tl.sum(tl.where((shape_parent == parent) & (shape_rank == rank), place, 0))
            fits = fits & (node > 0)
        else:
            node = found + 1
            fits = fits & (found < NODES) & (rank < BRANCHES) & (at(shape_depth, parent, place) < DEPTH)
        own = fits & (place == node)
        if len(STATIC) == 0:
            shape_depth = tl.where(own, at(shape_depth, parent, place) + 1, shape_depth)
            shape_parent = tl.where(own, parent, shape_parent)
        found_tokens = tl.where(own, token, found_tokens)
        taken = tl.where(fits & (place == index + 1), node, taken)
        found += fits.to(tl.int32)
    nodes = place <= NODES
    tl.store(drafts + row * NODES + place - 1, found_tokens, mask=nodes & (place > 0))
    tl.store(taken_parents + row * (NODES + 1) + place, shape_parent.to(tl.int64), mask=nodes)
    tl.store(depths + row * (NODES + 1) + place, shape_depth.to(tl.int64), mask=nodes)
    tl.store(lens + row, found.to(tl.int64))


@triton.jit
def walk_tree_rows(  # type: ignore[no-untyped-def]
    target, drafts, parents, path, accepted, nodes, DEPTH: tl.constexpr, PADDED: tl.constexpr
):
    """Program (row)."""
    row = tl.program_id(0)
    place = tl.arange(0, PADDED)
    there = place <= nodes
    chosen = tl.load(target + row * (nodes + 1) + place, mask=there, other=-1)
    draft = tl.load(drafts + row * nodes + place - 1, mask=there & (place > 0), other=-1)
    parent = tl.load(parents + row * (nodes + 1) + place, mask=there, other=-1)
    now = tl.min(tl.zeros((PADDED,), tl.int32))
    walks = now == 0
    count = now
    tl.store(path + row * (DEPTH + 1), now.to(tl.int64))
    for depth in tl.static_range(DEPTH):
        token = at(chosen, now, place)
        fits = (parent == now) & (draft == token) & (place > 0) & there & (token >= 0) & walks
        child = tl.min(tl.where(fits, place, PADDED))
        walks = child < PADDED
        now = tl.where(walks, child, now)
        count += walks.to(tl.int32)
        tl.store(path + row * (DEPTH + 1) + depth + 1, now.to(tl.int64))
    tl.store(accepted + row, count.to(tl.int64))


@triton.jit
def move_path_rows(  # type: ignore[no-untyped-def]
    kv,
    slots,
    root,
    path,
    accepted,
    pages,
    slot_stride,
    place_stride,
    page_size,
    table,
    inner,
    steps,
    BLOCK: tl.constexpr,
):
    """Program (block, row). No node of a path comes before its own place on it: what a place has is read before it is
    written, place by place, by the same thread."""
    block, row = tl.program_id(0), tl.program_id(1)
    slot, first = tl.load(slots + row), tl.load(root + row)
    if pages is not None:
        pages += slot * table
    else:
        kv += slot * slot_stride
    count = tl.load(accepted + row).to(tl.int32)
    offset = block * BLOCK + tl.arange(0, BLOCK)
    for step in range(1, tl.minimum(count + 1, steps)):
        node = tl.load(path + row * steps + step)
        moved = (offset < inner) & (node != step)
        at, to = first + node, first + step
        read, written = kv, kv
        if pages is not None:
            read += tl.load(pages + at // page_size) * slot_stride
            written += tl.load(pages + to // page_size) * slot_stride
            at, to = at % page_size, to % page_size
        value = tl.load(read + at * place_stride + offset, mask=moved)
        tl.store(written + to * place_stride + offset, value, mask=moved)


def fit_tree_launch(
    tokens: torch.Tensor,
    parents: torch.Tensor,
    count: torch.Tensor,
    limit: torch.Tensor,
    sizes: tuple[int, int, int],
    static_parents: list[int],
    static_ranks: list[int],
    outputs: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor],
) -> Launch:
    """One launch, into ``outputs``; ``sizes`` are nodes, depth and branches."""
    nodes, depth, branches = sizes
    rows, proposed = tokens.shape
    drafts, taken_parents, depths, lens = outputs
    return Launch(
        fit_tree_rows,
        (rows,),
        {
            "tokens": tokens,
            "parents": parents,
            "count": count,
            "limit": limit,
            "drafts": drafts,
            "taken_parents": taken_parents,
            "depths": depths,
            "lens": lens,
            "proposed": proposed,
            "STATIC": tuple(static_parents),
            "RANKS": tuple(static_ranks),
            "NODES": nodes,
            "DEPTH": depth,
            "BRANCHES": branches,
            "PADDED": power_of_2(1 + max(nodes, proposed)),
        },
        warps=1,
    )


def fit_tree(
    tokens: torch.Tensor,
    parents: torch.Tensor,
    count: torch.Tensor,
    limit: torch.Tensor,
    nodes: int,
    depth: int,
    branches: int,
    static_parents: list[int],
    static_ranks: list[int],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """``speccompile::fit_tree`` on CUDA. A proposed node whose parent comes after it is left out."""
    rows = tokens.shape[0]
    outputs = (
        tokens.new_empty((rows, nodes)),
        tokens.new_empty((rows, nodes + 1)),
        tokens.new_empty((rows, nodes + 1)),
        tokens.new_empty(rows),
    )
    read = tokens.contiguous(), parents.contiguous(), count.contiguous(), limit.contiguous()
    run_all([fit_tree_launch(*read, (nodes, depth, branches), static_parents, static_ranks, outputs)], tokens)
    return outputs


def walk_tree_launch(
    target: torch.Tensor,
    drafts: torch.Tensor,
    parents: torch.Tensor,
    depth: int,
    path: torch.Tensor,
    accepted: torch.Tensor,
) -> Launch:
    """One launch, into ``path`` and ``accepted``."""
    rows, nodes = drafts.shape
    return Launch(
        walk_tree_rows,
        (rows,),
        {
            "target": target,
            "drafts": drafts,
            "parents": parents,
            "path": path,
            "accepted": accepted,
            "nodes": nodes,
            "DEPTH": depth,
            "PADDED": power_of_2(nodes + 1),
        },
        warps=1,
    )


def walk_tree(
    target: torch.Tensor, drafts: torch.Tensor, parents: torch.Tensor, depth: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """``speccompile::walk_tree`` on CUDA."""
    path, accepted = target.new_empty((target.shape[0], depth + 1)), target.new_empty(target.shape[0])
    read = target.contiguous(), drafts.contiguous(), parents.contiguous()
    run_all([walk_tree_launch(*read, depth, path, accepted)], target)
    return path, accepted


def move_path_launch(
    kv: torch.Tensor,
    slots: torch.Tensor,
    root: torch.Tensor,
    path: torch.Tensor,
    accepted: torch.Tensor,
    pages: torch.Tensor | None = None,
) -> Launch:
    """One launch over a tensor ``[N, S, ...]``, or a pool of pages ``[P, C, ...]``, contiguous from its third dimension
    on."""
    inner = kv[0, 0].numel()
    return Launch(
        move_path_rows,
        (-(-inner // BLOCK), path.shape[0]),
        {
            "kv": kv,
            "slots": slots,
            "root": root,
            "path": path,
            "accepted": accepted,
            "pages": pages,
            "slot_stride": kv.stride(0),
            "place_stride": kv.stride(1),
            "page_size": kv.shape[1],
            "table": 0 if pages is None else pages.shape[1],
            "inner": inner,
            "steps": path.shape[1],
            "BLOCK": BLOCK,
        },
    )


def move_path(
    kv: list[torch.Tensor],
    slots: torch.Tensor,
    root: torch.Tensor,
    path: torch.Tensor,
    accepted: torch.Tensor,
    pages: torch.Tensor | None = None,
) -> None:
    """``speccompile::move_path_`` on CUDA."""
    read = slots.contiguous(), root.contiguous(), path.contiguous(), accepted.contiguous()
    table = None if pages is None else pages.contiguous()
    run_all([move_path_launch(tensor, *read, table) for tensor in kv], path)

"""The part of the cache that a query sees, for the attention kernels."""

from __future__ import annotations

import triton
import triton.language as tl

# Less than any score: a maximum that nothing has been seen for. Finite, since -inf - -inf is not a number.
NOTHING = tl.constexpr(-1e38)


@triton.jit
def first_seen(own, WINDOW: tl.constexpr, CHUNK: tl.constexpr):  # type: ignore[no-untyped-def]
    """The first position that queries at positions ``own`` see."""
    first = own * 0
    if WINDOW is not None:
        first = tl.maximum(first, own - (WINDOW - 1))
    if CHUNK is not None:
        first = tl.maximum(first, own - own % CHUNK)
    return first


@triton.jit
def seen_nodes(node, place, first, positions, parents, width):  # type: ignore[no-untyped-def]
    """Mask ``[QUERIES, KEYS]`` of the nodes (``node [KEYS]``, the root is 0) that the queries of nodes ``place
    [QUERIES]`` see: its ancestors and itself.
    """
    within = (node >= 0) & (node < width)
    position = tl.load(positions + node, mask=within, other=-1).to(tl.int32)
    ancestor = place
    on_path = place[:, None] == node[None, :]
    for _ in range(1, width):
        ancestor = tl.load(parents + ancestor, mask=(ancestor >= 0) & (ancestor < width), other=-1).to(tl.int32)
        on_path = on_path | (ancestor[:, None] == node[None, :])
    return on_path & within[None, :] & (position[None, :] >= first[:, None])

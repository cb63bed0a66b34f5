"""Division of attention into programs. It depends only on static sizes, so a CUDA graph can hold it."""

from __future__ import annotations

from dataclasses import dataclass

import torch

# More partial results a query than this cost more to write and to combine than their programs gain.
MAX_SPLITS = 64
# Programs that keep a large GPU busy (132 multiprocessors in an H100, several programs on each).
PROGRAMS = 1024
# A program that reads a single block of keys has nothing to load ahead.
LEAST_BLOCKS = 2
# tl.dot needs at least 16 rows; more than 64 need more registers than a thread has for wide heads.
LEAST_QUERIES, MOST_QUERIES = 16, 64
# Blocks of keys are this size, or smaller powers of 2.
MOST_KEYS = 64


def power_of_2(size: int) -> int:
    """The least power of 2 that is at least ``size``."""
    return 1 << max(0, size - 1).bit_length()


@dataclass(frozen=True)
class AttentionPlan:
    """Sizes of the grid and of its tiles.

    A program attends ``queries`` queries of one KV head (all query heads of its group, at as many positions as fit) to
    ``blocks`` blocks of ``keys`` keys; blocks begin at multiples of ``keys``.
    """

    queries: int
    keys: int
    blocks: int
    tiles: int
    splits: int
    warps: int
    stages: int


def plan_attention(
    rows: int,
    width: int,
    heads: int,
    groups: int,
    dim: int,
    value_dim: int,
    capacity: int,
    dtype: torch.dtype,
    fixed_order: bool,
    in_8_bits: bool = False,
) -> AttentionPlan:
    """The plan for B rows of T queries with H heads over G KV heads and a cache of S places, perhaps of rows of 8 bits.

    With ``fixed_order`` nothing that orders a query's reduction (``queries``, ``keys``, ``blocks``, ``warps``)
    depends on B or T.
    """
    widest = max(power_of_2(dim), power_of_2(value_dim))
    # Tiles whose programs spill no register when compiled for sm_90 (tests/ops/triton/test_triton_sm90.py).
    if dtype.itemsize == 4:
        most, keys = 16, 32 if widest <= 256 else 16
    else:
        most, keys = 64 if widest <= 256 else 32, MOST_KEYS if widest <= 128 else 32
        if in_8_bits:
            most, keys = 32, MOST_KEYS if widest <= 64 else 32
    per_group = heads // groups
    packed = per_group if fixed_order else per_group * width
    queries = min(most, max(LEAST_QUERIES, power_of_2(packed)))
    tiles = -(-per_group * width // queries)
    all_blocks = -(-capacity // keys)
    splits = MAX_SPLITS if fixed_order else max(1, min(MAX_SPLITS, PROGRAMS // (rows * groups * tiles)))
    blocks = max(LEAST_BLOCKS, -(-all_blocks // splits))
    warps = (
        8
        if (in_8_bits and widest <= 64)
        or widest > 128
        or widest * max(queries, 2 * keys if dtype.itemsize == 4 else 0) > 64 * 64
        else 4
    )
    return AttentionPlan(
        queries, keys, blocks, tiles, -(-all_blocks // blocks), warps, stages=3 if widest <= 128 else 2
    )


def workspace_size(plan: AttentionPlan, rows: int, width: int, heads: int, value_dim: int) -> int:
    """Number of float32 elements of the partial results: for each split and query a vector, a maximum and a sum. 0 for
    a plan of one split.
    """
    if plan.splits == 1:
        return 0
    return rows * plan.splits * width * heads * (value_dim + 2)

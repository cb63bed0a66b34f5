"""Comparison of the C++ ops of drafted trees with the functions that other devices run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from speccompile.ops.cpu.library import load_cpu_ops
from speccompile.ops.draft_levels import (
    as_target_ids,
    choose_nodes,
    first_place,
    likeliest_tree,
    next_level,
    positions_of_nodes,
    with_nodes,
)
from speccompile.ops.draft_rows import form_of, rows_of
from speccompile.ops.stored_trees import (
    chain_parents,
    proposed_or_stored_tree,
    store_proposed_tree_,
    store_tree_,
    stored_tree,
)
from speccompile.ops.verify_tree import rows_on_path

SLOTS, MOST = 5, 9
IN_CPP = {"linears_fused"}
SEEDS = st.integers(0, 2**30)
ROWS = st.integers(1, 3)


@pytest.fixture(scope="module", autouse=True)
def loaded() -> None:
    assert load_cpu_ops() is None


def integers(*size: int, low: int = 0, high: int, generator: torch.Generator) -> torch.Tensor:
    return torch.randint(low, high, size, generator=generator)


def chances_of(*size: int, generator: torch.Generator) -> torch.Tensor:
    """Log-probabilities with equal ones, impossible ones, and NaN among them."""
    chances = -integers(*size, high=4, generator=generator).float()
    chances[torch.rand(size, generator=generator) < 0.2] = float("-inf")
    chances[torch.rand(size, generator=generator) < 0.1] = float("nan")
    return chances


def slots_of(rows: int, generator: torch.Generator) -> torch.Tensor:
    return torch.randperm(SLOTS, generator=generator)[:rows]


def assert_same(function: Callable[..., Any], *arguments: Any) -> None:
    found, expected = form_of(function, IN_CPP)(*arguments), function(*arguments)
    if isinstance(expected, torch.Tensor):
        found, expected = (found,), (expected,)
    for made, other in zip(found, expected, strict=True):
        assert made.dtype is other.dtype and made.shape == other.shape
        assert torch.equal(made.nan_to_num(7.0, 8.0, 9.0), other.nan_to_num(7.0, 8.0, 9.0))


@settings(max_examples=60, deadline=None)
@given(rows=ROWS, nodes=st.integers(1, 3), count=st.integers(1, 4), strided=st.booleans(), seed=SEEDS)
def test_levels(rows: int, nodes: int, count: int, strided: bool, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    tokens = integers(rows, nodes, 2 * count, low=-1, high=7, generator=generator)
    tokens = tokens[..., ::2] if strided else tokens[..., :count].contiguous()
    logprobs = chances_of(rows, nodes, count, generator=generator)
    assert_same(as_target_ids, tokens, integers(7, high=99, generator=generator))
    assert_same(next_level, tokens, logprobs)
    above = chances_of(rows, nodes, generator=generator), integers(rows, nodes, high=9, generator=generator)
    assert_same(next_level, tokens, logprobs, *above, 3)
    level = tokens.flatten(1), logprobs.flatten(1)
    assert_same(choose_nodes, *level, min(2, nodes * count), (), count)
    fixed = torch.randperm(nodes * count, generator=generator)[:2].tolist()
    assert_same(choose_nodes, *level, len(fixed), fixed, count)


@settings(max_examples=30, deadline=None)
@given(
    rows=ROWS,
    before=st.integers(0, 3),
    count=st.integers(1, 3),
    dtype=st.sampled_from((torch.float32, torch.bfloat16)),
    seed=SEEDS,
)
def test_nodes_that_are_read(rows: int, before: int, count: int, dtype: torch.dtype, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    tokens, came_from = (integers(rows, count, high=max(before, 1), generator=generator) for _ in range(2))
    read = [integers(rows, before, high=9, generator=generator) for _ in range(2)] if before else []
    assert_same(with_nodes, tokens, came_from, *read, *([before - 1] if before else []))
    length, slots = integers(SLOTS, high=12, generator=generator), slots_of(rows, generator)
    assert_same(first_place, length, slots, 1, 9)
    assert_same(positions_of_nodes, length[:rows], tuple(range(1, count + 1)))
    carried = torch.randn(rows, max(before, 1), 6, generator=generator).to(dtype)
    assert_same(rows_on_path, carried, came_from)
    assert_same(rows_of, torch.randn(SLOTS, 2, 3, generator=generator).to(dtype), slots)
    assert_same(rows_of, length, slots)


@settings(max_examples=60, deadline=None)
@given(rows=ROWS, width=st.integers(1, 8), nodes=st.integers(1, 9), max_len=st.integers(2, 14), seed=SEEDS)
def test_likeliest_trees(rows: int, width: int, nodes: int, max_len: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    tokens = integers(rows, width, low=-1, high=9, generator=generator)
    chances = chances_of(rows, width, generator=generator)
    parents = torch.stack([integers(rows, high=place + 1, generator=generator) for place in range(width)], dim=1)
    length, limit = (integers(SLOTS, high=13, generator=generator) for _ in range(2))
    depths = sorted(integers(width, low=1, high=4, generator=generator).tolist())
    state = (length, limit, slots_of(rows, generator))
    assert_same(likeliest_tree, tokens, chances, parents, *state, depths, max_len, nodes)


@settings(max_examples=40, deadline=None)
@given(rows=ROWS, nodes=st.integers(1, MOST), seed=SEEDS)
def test_trees_in_state(rows: int, nodes: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    slots, lens = slots_of(rows, generator), integers(rows, high=nodes + 1, generator=generator)
    tree = [integers(rows, nodes + more, low=-1, high=9, generator=generator) for more in (0, 1, 1)]
    states = [[torch.full((SLOTS, MOST), 7) for _ in range(3)] + [torch.full((SLOTS,), 7)] for _ in range(2)]
    form_of(store_tree_, IN_CPP)(*states[0], slots, *tree, lens)
    store_tree_(*states[1], slots, *tree, lens)
    assert all(torch.equal(*pair) for pair in zip(*states, strict=True))
    assert_same(stored_tree, *states[0], slots, nodes)
    draft_lens = integers(SLOTS, high=2, generator=generator)
    assert_same(proposed_or_stored_tree, draft_lens, slots, *tree, lens, *stored_tree(*states[0], slots, nodes))
    assert_same(chain_parents, lens, nodes)
    proposed = [integers(rows, MOST, high=9, generator=generator) for _ in range(2)]
    count = integers(rows, low=-1, high=MOST + 3, generator=generator)
    kept = [[torch.full((SLOTS, MOST), 7) for _ in range(2)] + [torch.full((SLOTS,), 7)] for _ in range(2)]
    form_of(store_proposed_tree_, IN_CPP)(*kept[0], slots, *proposed, count)
    store_proposed_tree_(*kept[1], slots, *proposed, count)
    assert all(torch.equal(*pair) for pair in zip(*kept, strict=True))


def test_sizes_and_indices_that_do_not_fit_are_refused() -> None:
    ops, one = torch.ops.speccompile, torch.zeros(1, dtype=torch.int64)
    with pytest.raises(RuntimeError, match="sizes do not fit"):
        ops.choose_nodes(one[None], torch.zeros(1, 1), 2, [], 1)
    with pytest.raises(RuntimeError, match="index 3 is out of range, size 1"):
        ops.first_place(one, one + 3, 0, 5)
    with pytest.raises(RuntimeError, match="has no slot 4"):
        ops.rows_of(torch.zeros(2, 3), one + 4)
    with pytest.raises(RuntimeError, match="has no node 2"):
        ops.rows_on_path(torch.zeros(1, 1, 4), one[None] + 2)

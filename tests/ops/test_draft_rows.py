"""Comparison of drafters' C++ ops, which read texts and write state, with the functions that other devices run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from speccompile.ops.cpu.library import load_cpu_ops
from speccompile.ops.draft_rows import (
    cut_drafts,
    form_of,
    network_positions,
    newest_tokens,
    next_token,
    store_chain_,
    store_newest_,
    tokens_after,
)

SLOTS, CAPACITY = 5, 12
IN_CPP = {"linears_fused"}


@pytest.fixture(scope="module", autouse=True)
def loaded() -> None:
    assert load_cpu_ops() is None


def integers(*size: int, low: int = 0, high: int, generator: torch.Generator) -> torch.Tensor:
    return torch.randint(low, high, size, generator=generator)


def assert_same(function: Callable[..., Any], *arguments: Any) -> None:
    for made, expected in zip(form_of(function, IN_CPP)(*arguments), function(*arguments), strict=True):
        assert made.dtype is expected.dtype and torch.equal(made, expected)


@settings(max_examples=100, deadline=None)
@given(rows=st.integers(1, 3), draft_len=st.integers(1, 5), max_len=st.integers(2, 14), seed=st.integers(0, 2**30))
def test_newest_tokens(rows: int, draft_len: int, max_len: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    tokens = integers(SLOTS, CAPACITY, high=99, generator=generator)
    length, limit = (integers(SLOTS, high=CAPACITY + 1, generator=generator) for _ in range(2))
    slots = torch.randperm(SLOTS, generator=generator)[:rows]
    assert_same(newest_tokens, tokens, length, limit, slots, draft_len, max_len)


@settings(max_examples=50, deadline=None)
@given(rows=st.integers(1, 4), part=st.booleans(), seed=st.integers(0, 2**30))
def test_next_token(rows: int, part: bool, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    drawn = integers(rows, 1, low=-1, high=7, generator=generator)
    position = integers(rows, 1, high=99, generator=generator)
    ids = [integers(7, high=99, generator=generator)] * part
    assert_same(next_token, drawn, position, *ids)


@settings(max_examples=50, deadline=None)
@given(rows=st.integers(1, 3), width=st.integers(1, 4), seed=st.integers(0, 2**30))
def test_tokens_after(rows: int, width: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    tokens = integers(SLOTS, CAPACITY, high=99, generator=generator)
    slots = torch.randperm(SLOTS, generator=generator)[:rows]
    positions = integers(rows, width, high=CAPACITY + 2, generator=generator)
    made = form_of(tokens_after, IN_CPP)(tokens, slots, positions)
    assert torch.equal(made, tokens_after(tokens, slots, positions))


@settings(max_examples=100, deadline=None)
@given(
    rows=st.integers(1, 3),
    width=st.integers(1, 4),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    seed=st.integers(0, 2**30),
)
def test_store_newest(rows: int, width: int, dtype: torch.dtype, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    length = integers(SLOTS, high=CAPACITY, generator=generator)
    # The last slot is that of rows without a request.
    slots = torch.randperm(SLOTS - 1, generator=generator)[:rows]
    positions = integers(rows, 1, high=CAPACITY, generator=generator) + torch.arange(width)
    hidden = torch.randn(rows, width, 6, generator=generator).to(dtype)
    made, expected = (torch.zeros(SLOTS, 6, dtype=dtype) for _ in range(2))
    form_of(store_newest_, IN_CPP)(made, length, slots, positions, hidden, SLOTS - 1)
    store_newest_(expected, length, slots, positions, hidden, SLOTS - 1)
    assert torch.equal(made[:-1], expected[:-1])


@settings(max_examples=50, deadline=None)
@given(
    rows=st.integers(1, 3),
    width=st.integers(1, 4),
    begin=st.integers(0, 2),
    strided=st.booleans(),
    seed=st.integers(0, 2**30),
)
def test_drafts_are_cut_and_stored(rows: int, width: int, begin: int, strided: bool, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    tokens = integers(rows, 2 * width, high=99, generator=generator)
    tokens = tokens[:, ::2] if strided else tokens[:, :width].contiguous()
    lens = integers(rows, high=begin + width + 1, generator=generator)
    cut = form_of(cut_drafts, IN_CPP)(tokens, lens, begin)
    assert torch.equal(cut, cut_drafts(tokens, lens, begin))
    slots = torch.randperm(SLOTS, generator=generator)[:rows]
    made, expected = ((torch.full((SLOTS, 6), 7), torch.full((SLOTS,), 7)) for _ in range(2))
    form_of(store_chain_, IN_CPP)(*made, slots, tokens, lens, begin)
    store_chain_(*expected, slots, tokens, lens, begin)
    assert all(torch.equal(*pair) for pair in zip(made, expected, strict=True))


@pytest.mark.parametrize("back", [0, 1])
def test_network_positions(back: int) -> None:
    positions = torch.arange(-1, 11).reshape(3, 4)[:, ::2] + back
    made = form_of(network_positions, IN_CPP)(positions, back, 6)
    assert torch.equal(made, network_positions(positions, back, 6)) and made.max() == 6


def test_steps_on_torchs_own_kernels_run_the_functions() -> None:
    functions = (newest_tokens, next_token, tokens_after, store_newest_, cut_drafts, store_chain_, network_positions)
    for function in functions:
        assert form_of(function, set()) is function
        assert form_of(function, IN_CPP) is getattr(torch.ops.speccompile, function.__name__)


def test_sizes_that_do_not_fit_are_refused() -> None:
    ops, one = torch.ops.speccompile, torch.zeros(1, dtype=torch.int64)
    with pytest.raises(RuntimeError, match="sizes or dtypes do not fit"):
        ops.store_newest_(torch.zeros(2, 3), one, one, one[None], torch.zeros(1, 1, 4), 1)
    with pytest.raises(RuntimeError, match="sizes do not fit"):
        ops.store_chain_(one[None], one, one, torch.zeros((1, 2), dtype=torch.int64), one, 0)
    with pytest.raises(RuntimeError, match="sizes do not fit"):
        ops.cut_drafts(torch.zeros((2, 2), dtype=torch.int64), one, 0)
    with pytest.raises(RuntimeError, match="sizes do not fit"):
        ops.next_token(one[None], torch.zeros((2, 1), dtype=torch.int64))

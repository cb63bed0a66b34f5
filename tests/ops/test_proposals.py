"""Comparison of the C++ ops that choose among proposals with the functions that other devices run."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from speccompile.ops.cpu.library import load_cpu_ops
from speccompile.ops.draft_rows import form_of, side_by_side
from speccompile.ops.proposals import proposed_or_stored, store_rows_, take_passing

K, SLOTS = 4, 6
IN_CPP = {"linears_fused"}
seeds = st.integers(0, 2**30)


@pytest.fixture(scope="module", autouse=True)
def loaded() -> None:
    assert load_cpu_ops() is None


def proposal(rows: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Drafts, lengths and cumulative probabilities of eighths, whose sums are exact."""
    drafts = torch.randint(0, 99, (rows, K), generator=generator)
    lens = torch.randint(0, K + 1, (rows,), generator=generator)
    return drafts, lens, torch.randint(0, 9, (rows, K), generator=generator) / 8


@settings(max_examples=100, deadline=None)
@given(
    rows=st.integers(1, 4),
    scored=st.booleans(),
    others=st.booleans(),
    always=st.booleans(),
    least=st.sampled_from([0.0, 0.5, 1.0, 2.5]),
    seed=seeds,
)
def test_take_passing(rows: int, scored: bool, others: bool, always: bool, least: float, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    drafts, lens, scores = proposal(rows, generator)
    after = (*proposal(rows, generator), torch.randint(1, 3, (rows,), generator=generator)) if others else (None,) * 4
    arguments = drafts, lens, scores if scored else None, *after, 0, least, always
    expected = take_passing(*arguments)
    for made, wanted in zip(form_of(take_passing, IN_CPP)(*arguments), expected, strict=True):
        assert made.dtype is wanted.dtype and torch.equal(made, wanted)
    for row in range(rows):
        passes = always or (lens[row] > 0 and (not scored or scores[row, : lens[row]].sum() >= least))
        assert int(expected[3][row]) == (0 if passes else int(after[3][row]) if after[3] is not None else 1)


@settings(max_examples=100, deadline=None)
@given(rows=st.integers(1, 4), draft_len=st.integers(1, K), seed=seeds)
def test_proposed_or_stored(rows: int, draft_len: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    (proposed, lens, _), (stored, stored_lens, _) = (proposal(SLOTS, generator) for _ in range(2))
    length, limit = (torch.randint(0, 12, (SLOTS,), generator=generator) for _ in range(2))
    slots = torch.randperm(SLOTS, generator=generator)[:rows]
    arguments = proposed, lens, stored, stored_lens, length, limit, slots, draft_len
    expected = proposed_or_stored(*arguments)
    for made, wanted in zip(form_of(proposed_or_stored, IN_CPP)(*arguments), expected, strict=True):
        assert torch.equal(made, wanted)
    for row, slot in enumerate(slots.tolist()):
        drafts, count = (proposed, lens) if lens[slot] else (stored, stored_lens)
        count_of = min(int(count[slot]), draft_len, max(0, int(limit[slot] - length[slot]) - 1))
        wanted_drafts = drafts[slot, :count_of].tolist() + [-1] * (draft_len - count_of)
        assert expected[0][row].tolist() == wanted_drafts and int(expected[1][row]) == count_of


@pytest.mark.parametrize("dtype", [torch.int64, torch.float32])
@pytest.mark.parametrize("shape", [(), (K,)])
def test_store_rows(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    slots, values = torch.tensor([4, 1]), torch.arange(2 * max(1, *shape, 1)).reshape(2, *shape).to(dtype)
    made, expected = (torch.full((SLOTS, *shape), 7, dtype=dtype) for _ in range(2))
    form_of(store_rows_, IN_CPP)(made, slots, values)
    store_rows_(expected, slots, values)
    assert torch.equal(made, expected)


@pytest.mark.parametrize("dtype", [torch.int64, torch.float32, torch.bfloat16])
def test_side_by_side(dtype: torch.dtype) -> None:
    parts = [torch.arange(6 * width).reshape(2, 3, width).to(dtype) for width in (4, 1, 2)]
    parts.append(parts[0].transpose(0, 1).reshape(3, 2, 4).transpose(0, 1))
    assert torch.equal(form_of(side_by_side, IN_CPP)(*parts), side_by_side(*parts))


def test_sizes_that_do_not_fit_are_refused() -> None:
    ops, one = torch.ops.speccompile, torch.zeros(1, dtype=torch.int64)
    with pytest.raises(RuntimeError, match="sizes or dtypes do not fit"):
        ops.store_rows_(torch.zeros(2, 3), one, torch.zeros(1, 4))
    with pytest.raises(RuntimeError, match="sizes or dtypes do not fit"):
        ops.side_by_side([torch.zeros(2, 3), torch.zeros(3, 3)])
    with pytest.raises(RuntimeError, match="sizes do not fit"):
        ops.take_passing(one[None], torch.zeros(2, dtype=torch.int64), *[None] * 5, 0, 1.0, False)

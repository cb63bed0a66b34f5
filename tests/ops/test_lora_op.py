"""What adapters add to linears: the definition, C++ against it, and the bits of a row in any company."""

from __future__ import annotations

import contextlib

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import speccompile.ops  # noqa: F401  defines the ops
from speccompile.ops.cpu.library import load_cpu_ops
from speccompile.ops.lora import NONE
from speccompile.utils.workers import in_pool
from support.lora_cases import TOLERANCE, case

assert load_cpu_ops("lora") is None

OPS = torch.ops.speccompile
FORMS = ("lora", "native_lora")


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_each_row_is_adapted_by_its_own_matrices(form: str, dtype: torch.dtype) -> None:
    for seed in range(6):
        made = case(rows=5, width=1 + seed, seed=seed, dtype=dtype)
        made.check(made.run(getattr(OPS, form)))


@settings(deadline=None, max_examples=40)
@given(rows=st.integers(1, 9), width=st.integers(1, 9), seed=st.integers(0, 99))
def test_a_row_has_the_same_bits_at_any_width_and_among_any_rows(rows: int, width: int, seed: int) -> None:
    made = case(rows, width, seed=seed)
    whole = made.run(OPS.native_lora)
    row, place = seed % rows, seed % width
    for part in ((slice(row, row + 1), slice(None)), (slice(None), slice(place, place + 1)), (slice(row, None),) * 2):
        alone = made.run(OPS.native_lora, *part)
        assert all(torch.equal(one, all_[part]) for one, all_ in zip(alone, whole, strict=True))


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("rows", [1, 3, 9])
def test_threads_change_no_bit(rows: int, dtype: torch.dtype) -> None:
    # So large that several threads share the matrices of one row.
    made = case(rows, 2, depth=1200, features=(33, 2100, 100), dtype=dtype)
    made.places = torch.arange(rows) % 4
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        wanted = made.run(OPS.native_lora)
        for count in (2, 5, 16):
            torch.set_num_threads(count)
            for place in (contextlib.nullcontext(), in_pool(tokens=1)):
                with place:
                    found = made.run(OPS.native_lora)
                assert all(torch.equal(one, other) for one, other in zip(found, wanted, strict=True)), count
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("form", FORMS)
def test_what_is_not_a_number_stays_in_its_own_row(form: str) -> None:
    made = case(rows=4, width=2)
    made.places = torch.tensor([NONE, 1, 2, NONE])
    made.ranks[1:3].fill_(3)
    expected = made.run(getattr(OPS, form))
    made.x[0, 0].fill_(torch.nan)
    made.outputs[2][3, 1].fill_(torch.inf)
    made.a[0][0].fill_(torch.nan)
    got = made.run(getattr(OPS, form))
    for before, after in zip(expected, got, strict=True):
        assert torch.equal(before[1:3], after[1:3]) and torch.equal(before[0], after[0])
    assert bool(got[2][3, 1].isinf().all())


def test_rows_may_be_flat() -> None:
    made = case(rows=3, width=4)
    flat = OPS.native_lora(
        made.x.flatten(0, 1),
        [output.flatten(0, 1) for output in made.outputs],
        made.a,
        made.b,
        made.ranks,
        made.scales,
        1,
        made.places,
    )
    assert all(torch.equal(a, b.flatten(0, 1)) for a, b in zip(flat, made.run(OPS.native_lora), strict=True))


def test_a_place_that_is_not_there_is_an_error() -> None:
    made = case(rows=2, width=1)
    made.places = torch.tensor([0, 4])
    with pytest.raises(RuntimeError, match="row 1 has the adapter 4"):
        made.run(OPS.native_lora)

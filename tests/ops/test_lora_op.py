"""What adapters add to linears: the definition, C++ against it, and the bits of a row in any company."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import speccompile.ops  # noqa: F401  defines the ops
from speccompile.ops.cpu.library import load_cpu_ops
from speccompile.ops.lora import NONE, pack_down, pack_up
from speccompile.utils.workers import in_pool

assert load_cpu_ops("lora") is None

OPS = torch.ops.speccompile
FORMS = ("lora", "native_lora")
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}


@dataclass
class Case:
    """Three linears of one input, and adapters for them."""

    x: torch.Tensor
    outputs: list[torch.Tensor]
    down: list[list[torch.Tensor]]
    up: list[list[torch.Tensor]]
    a: list[torch.Tensor]
    b: list[torch.Tensor]
    ranks: torch.Tensor
    scales: torch.Tensor
    places: torch.Tensor

    def run(self, form: str, rows: slice = slice(None), width: slice = slice(None)) -> list[torch.Tensor]:
        """Over some rows and places. The linears are numbers 1 to 3 of their layer."""
        outputs = [output[rows, width] for output in self.outputs]
        op = getattr(OPS, form)
        return list(op(self.x[rows, width], outputs, self.a, self.b, self.ranks, self.scales, 1, self.places[rows]))


def case(
    rows: int,
    width: int,
    *,
    depth: int = 65,
    features: tuple[int, ...] = (33, 64, 100),
    most: int = 32,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
) -> Case:
    """Four adapters, some of which leave linears out; the rows have them, or none."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    adapters = 4
    ranks = torch.randint(1, most + 1, (adapters, 4), generator=generator)
    ranks *= torch.rand((adapters, 4), generator=generator) < 0.8
    down = [[normal(int(ranks[p, i + 1]), depth) / depth**0.5 for p in range(adapters)] for i in range(3)]
    up = [[normal(size, int(ranks[p, i + 1])) for p in range(adapters)] for i, size in enumerate(features)]
    return Case(
        normal(rows, width, depth),
        [normal(rows, width, size) for size in features],
        down,
        up,
        [torch.stack([pack_down(matrix, most) for matrix in of]) for of in down],
        [torch.stack([pack_up(matrix, most) for matrix in of]) for of in up],
        ranks,
        torch.rand((adapters, 4), generator=generator),
        torch.randint(NONE, adapters, (rows,), generator=generator),
    )


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_each_row_is_adapted_by_its_own_matrices(form: str, dtype: torch.dtype) -> None:
    for seed in range(6):
        made = case(rows=5, width=1 + seed, seed=seed, dtype=dtype)
        for i, (got, output) in enumerate(zip(made.run(form), made.outputs, strict=True)):
            assert got.dtype == dtype and got.shape == output.shape
            for row, place in enumerate(made.places.tolist()):
                wanted = output[row].double()
                if place != NONE and made.ranks[place, i + 1]:
                    a, b = made.down[i][place].double(), made.up[i][place].double()
                    wanted = wanted + made.x[row].double() @ a.t() @ b.t() * made.scales[place, i + 1].double()
                else:
                    assert torch.equal(got[row], output[row])
                limit = TOLERANCE[dtype] * max(1.0, float(wanted.abs().max()))
                assert float((got[row].double() - wanted).abs().max()) <= limit


@settings(deadline=None, max_examples=40)
@given(rows=st.integers(1, 9), width=st.integers(1, 9), seed=st.integers(0, 99))
def test_a_row_has_the_same_bits_at_any_width_and_among_any_rows(rows: int, width: int, seed: int) -> None:
    made = case(rows, width, seed=seed)
    whole = made.run("native_lora")
    row, place = seed % rows, seed % width
    for part in ((slice(row, row + 1), slice(None)), (slice(None), slice(place, place + 1)), (slice(row, None),) * 2):
        alone = made.run("native_lora", *part)
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
        wanted = made.run("native_lora")
        for count in (2, 5, 16):
            torch.set_num_threads(count)
            for place in (contextlib.nullcontext(), in_pool(tokens=1)):
                with place:
                    found = made.run("native_lora")
                assert all(torch.equal(one, other) for one, other in zip(found, wanted, strict=True)), count
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("form", FORMS)
def test_what_is_not_a_number_stays_in_its_own_row(form: str) -> None:
    made = case(rows=4, width=2)
    made.places = torch.tensor([NONE, 1, 2, NONE])
    made.ranks[1:3].fill_(3)
    expected = made.run(form)
    made.x[0, 0].fill_(torch.nan)
    made.outputs[2][3, 1].fill_(torch.inf)
    made.a[0][0].fill_(torch.nan)
    got = made.run(form)
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
    assert all(torch.equal(a, b.flatten(0, 1)) for a, b in zip(flat, made.run("native_lora"), strict=True))


def test_a_place_that_is_not_there_is_an_error() -> None:
    made = case(rows=2, width=1)
    made.places = torch.tensor([0, 4])
    with pytest.raises(RuntimeError, match="row 1 has the adapter 4"):
        made.run("native_lora")

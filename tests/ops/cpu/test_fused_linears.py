"""Linears with a norm, a gate or a residual: what they compute, and that a row has the same bits beside any others."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from speccompile.ops.cpu.forms import FORMS, Form
from speccompile.ops.cpu.library import load_cpu_ops
from speccompile.ops.fused_linears import ACTIVATIONS, linear_input

#: Of a result's size: the inputs are computed in another order, and where they are rounded to integers, a few of them
#: round to the neighbour.
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 4e-3}
ROUNDING = 4e-3

forms = pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
dtypes = pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
ENDS = ("norm", "offset norm", "gate", "residual", "norm and residual")


@pytest.fixture(scope="module", autouse=True)
def loaded() -> None:
    assert load_cpu_ops("rounded") is None


@dataclass(frozen=True)
class Case:
    """A call of a form's op, and of its linears on the same input."""

    form: Form
    x: torch.Tensor
    ends: tuple[Any, ...]
    residual: torch.Tensor | None
    lists: list[list[torch.Tensor]]
    biases: list[torch.Tensor]
    features: list[int]

    def fused(self, rows: slice = slice(None)) -> list[torch.Tensor]:
        gate, activation, norm, eps, offset = self.ends
        gate = None if gate is None else gate[rows]
        residual = None if self.residual is None else self.residual[rows]
        return self.form.fused(  # type: ignore[no-any-return]
            self.x[rows], gate, activation, norm, eps, offset, residual, *self.lists, self.biases, self.features
        )

    def apart(self, *, prepared: bool = False) -> list[torch.Tensor]:
        compute = torch.ops.speccompile.prepare_rows if prepared else linear_input
        read = compute(self.x, *self.ends)
        outputs = self.form.linears(read, *self.lists, self.biases, self.features)
        return [output if self.residual is None else self.residual + output for output in outputs]


def make(form: Form, dtype: torch.dtype, ends: str, rows: int, depth: int, seed: int, biased: bool = False) -> Case:
    generator = torch.Generator().manual_seed(seed)

    def drawn(*size: int) -> torch.Tensor:
        return torch.randn(size, generator=generator).to(dtype)

    features = [70] if "residual" in ends else [33, 96]
    gate, activation, norm, eps, offset = None, "", None, 0.0, 0.0
    if ends == "gate":
        gate, activation = drawn(rows, depth), list(ACTIVATIONS)[seed % len(ACTIVATIONS)]
    if "norm" in ends:
        norm, eps, offset = drawn(depth), 1e-5, float("offset" in ends)
    packed = [form.pack(drawn(count, depth) / depth**0.5) for count in features]
    return Case(
        form,
        drawn(rows, depth) * 3,
        (gate, activation, norm, eps, offset),
        drawn(rows, 70) if "residual" in ends else None,
        [list(tensors) for tensors in zip(*packed, strict=True)],
        [drawn(count) for count in features] if biased else [],
        features,
    )


@forms
@dtypes
@pytest.mark.parametrize("ends", ENDS)
@settings(max_examples=8, deadline=None)
@given(st.integers(1, 20), st.sampled_from([8, 64, 100, 600]), st.integers(0, 99), st.booleans())
def test_it_computes_what_the_ops_compute_one_by_one(
    form: Form, dtype: torch.dtype, ends: str, rows: int, depth: int, seed: int, biased: bool
) -> None:
    case = make(form, dtype, ends, rows, depth, seed, biased)
    for found, wanted in zip(case.fused(), case.apart(), strict=True):
        assert found.dtype is dtype and found.shape == wanted.shape
        difference = (found.double() - wanted.double()).norm() / wanted.double().norm()
        assert difference <= TOLERANCE[dtype] + ROUNDING * form.rounds


@forms
@dtypes
@pytest.mark.parametrize("ends", ENDS)
@settings(max_examples=4, deadline=None)
@given(st.integers(1, 20), st.sampled_from([8, 100, 600]), st.integers(0, 99), st.booleans())
def test_an_input_that_is_prepared_by_its_own_op_has_the_same_bits(
    form: Form, dtype: torch.dtype, ends: str, rows: int, depth: int, seed: int, biased: bool
) -> None:
    case = make(form, dtype, ends, rows, depth, seed, biased)
    for found, wanted in zip(case.fused(), case.apart(prepared=True), strict=True):
        assert torch.equal(found, wanted)


@forms
@pytest.mark.parametrize("ends", ENDS)
@settings(max_examples=8, deadline=None)
@given(st.integers(2, 20), st.sampled_from([64, 100, 600]), st.integers(0, 99))
def test_a_row_has_the_same_bits_alone(form: Form, ends: str, rows: int, depth: int, seed: int) -> None:
    case = make(form, torch.float32, ends, rows, depth, seed)
    whole = case.fused()
    for row in range(rows):
        for alone, among in zip(case.fused(slice(row, row + 1)), whole, strict=True):
            assert torch.equal(alone[0], among[row])


@forms
def test_threads_do_not_change_bits(form: Form) -> None:
    case = make(form, torch.float32, "gate", 16, 600, 0)
    several = case.fused()
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        alone = case.fused()
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(one, other) for one, other in zip(several, alone, strict=True))


@pytest.mark.parametrize("kind", [float("nan"), float("inf")])
@pytest.mark.parametrize("ends", ["norm", "gate"])
def test_what_is_no_number_spoils_its_own_row_alone(kind: float, ends: str) -> None:
    case = make(FORMS["same"], torch.float32, ends, 3, 64, 0)
    case.x[1, 5] = kind
    for output in case.fused():
        assert not output[1].isfinite().all() and output[[0, 2]].isfinite().all()


def test_sizes_and_dtypes_that_do_not_fit_are_refused() -> None:
    case = make(FORMS["same"], torch.float32, "norm", 3, 64, 0)
    op = case.form.fused
    rest = (*case.lists, case.biases, case.features)
    with pytest.raises(RuntimeError, match="the dtype and the sizes"):
        op(case.x, None, "", torch.ones(63), 1e-5, 0.0, None, *rest)
    with pytest.raises(RuntimeError, match="the dtype and the sizes"):
        op(case.x, None, "", torch.ones(64).half(), 1e-5, 0.0, None, *rest)
    with pytest.raises(RuntimeError, match="no gate of the activation relu"):
        op(case.x, case.x, "relu", None, 0.0, 0.0, None, *rest)
    with pytest.raises(RuntimeError, match="the output of one linear"):
        op(case.x, None, "", None, 0.0, 0.0, torch.ones(3, 33), *rest)


@settings(max_examples=30, deadline=None)
@given(
    rows=st.integers(1, 9),
    depths=st.tuples(st.integers(1, 80), st.integers(1, 80)),
    offset=st.sampled_from([0.0, 1.0]),
    dtype=st.sampled_from(list(TOLERANCE)),
    seed=st.integers(0, 2**30),
)
def test_norms_side_by_side_have_the_bits_of_each(
    rows: int, depths: tuple[int, int], offset: float, dtype: torch.dtype, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    parts = [
        (torch.randn(1, rows, depth, generator=generator).to(dtype), torch.randn(depth, generator=generator).to(dtype))
        for depth in depths
    ]
    joined = torch.ops.speccompile.join_rows(*parts[0], *parts[1], 1e-5, offset)
    apart = [torch.ops.speccompile.prepare_rows(x, None, "", norm, 1e-5, offset) for x, norm in parts]
    assert torch.equal(joined, torch.cat(apart, dim=-1))

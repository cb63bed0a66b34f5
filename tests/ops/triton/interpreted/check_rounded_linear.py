"""Linears and embeddings over rounded weights: the kernels against their definition (run by test_interpreted.py)."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from speccompile.ops.cpu.forms import FORMS
from speccompile.ops.cpu.forms.grouped import pack_grouped
from speccompile.ops.cpu.forms.int8 import quantise
from speccompile.ops.triton.launch import launches_of
from speccompile.ops.triton.rounded_linear import rounded_embedding, rounded_linear, rounded_linears, runs_of
from speccompile.quantized import GroupedWeight
from support import triton_interpreter  # noqa: F401


def expected(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    numbers, units = quantise(x.flatten(0, -2))
    rounded = (numbers * units[..., None]).flatten(1)[:, : x.shape[-1]]
    return F.linear(rounded, weight, bias).view(*x.shape[:-1], -1)


@pytest.mark.parametrize(
    ("form", "depth", "features"), [("int8", 70, 45), ("int4", 70, 45), ("int4", 128, 64), ("fp4", 70, 45)]
)
def test_it_multiplies_with_the_rounded_weight(form: str, depth: int, features: int) -> None:
    torch.manual_seed(0)
    weight, x, bias = torch.randn(features, depth), torch.randn(1, 3, depth), torch.randn(features)
    packed = FORMS[form].pack(weight)
    values = FORMS[form].unpack(packed, features, depth)
    coded = form == "fp4"
    torch.testing.assert_close(
        rounded_linear(x, *packed, None, features, coded), expected(x, values, None), rtol=1e-4, atol=1e-4
    )
    joined = rounded_linears(x, *([part] * 2 for part in packed), [bias, -bias], [features] * 2, coded)
    for given, found in zip((bias, -bias), joined, strict=True):
        torch.testing.assert_close(found, expected(x, values, given), rtol=1e-4, atol=1e-4)
    ids = torch.tensor([[3, features - 1], [0, 3]])
    assert torch.equal(rounded_embedding(*packed, ids, depth, coded), values[ids])


@pytest.mark.parametrize(
    ("bits", "group", "minimums"), [(4, 32, False), (4, 128, True), (8, 32, True), (8, 128, False)]
)
def test_it_reads_scales_and_minimums_of_any_group(bits: int, group: int, minimums: bool) -> None:
    torch.manual_seed(0)
    least = 0 if minimums else -(2 ** (bits - 1))
    values = torch.randint(least, least + 2**bits if bits == 4 else 127, (40, 256)).to(torch.int8)
    scales, below = torch.rand(40, 256 // group), torch.rand(40, 256 // group)
    stored = GroupedWeight(values, bits, scales, below if minimums else None, group)
    form, packed = pack_grouped(stored)
    weight, x = form.unpack(packed, 40, 256), torch.randn(3, 256)
    torch.testing.assert_close(weight, stored.dequantize())
    torch.testing.assert_close(rounded_linear(x, *packed, None, 40), expected(x, weight, None), rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("form", ["int8", "int4"])
def test_a_row_has_the_same_bits_in_any_company(form: str) -> None:
    torch.manual_seed(0)
    packed, x = FORMS[form].pack(torch.randn(32, 128)), torch.randn(10, 128)
    whole = rounded_linear(x, *packed, None, 32)
    for rows in (slice(0, 1), slice(7, 9), slice(9, 10)):
        assert torch.equal(rounded_linear(x[rows], *packed, None, 32), whole[rows])


def test_zeros_and_what_is_not_a_number_stay_what_they_are() -> None:
    packed, x = FORMS["int8"].pack(torch.randn(32, 64)), torch.zeros(2, 64)
    x[1, 5] = torch.nan
    found = rounded_linear(x, *packed, None, 32)
    assert (found[0] == 0).all() and found[1].isnan().all()


def test_up_to_three_linears_are_one_launch_with_the_bits_of_single_ones() -> None:
    torch.manual_seed(0)
    features = [33, 64, 70, 45]
    packs = [FORMS["int4"].pack(torch.randn(count, 70)) for count in features]
    biases = [torch.randn(count) for count in features]
    x = torch.randn(2, 1, 70)
    packed, scales = map(list, zip(*packs, strict=True))
    joined = rounded_linears(x, packed, scales, biases, features)
    for number, count in enumerate(features):
        alone = rounded_linear(x, packed[number], scales[number], biases[number], count)
        assert torch.equal(joined[number], alone)
    launches = launches_of(lambda: rounded_linears(x, packed, scales, biases, features))
    assert [launch.kernel.__name__ for launch in launches] == ["round_inputs", "multiply_rounded", "multiply_rounded"]
    assert [launch.grid for launch in launches[1:]] == [(1, 2 + 2 + 3), (1, 2)]


def test_packs_of_other_sizes_have_a_launch_of_their_own() -> None:
    packs = [FORMS[form].pack(torch.randn(64, 128)) for form in ("int8", "int8", "int4", "int8")]
    packed, scales = map(list, zip(*packs, strict=True))
    assert runs_of(packed, scales) == [slice(0, 2), slice(2, 3), slice(3, 4)]

"""Linears over rounded weights of chosen experts: against the definition, and the bits of a pair in any company."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import speccompile.ops  # noqa: F401  defines the ops
from speccompile.errors import LoweringError
from speccompile.ops.cpu.forms.int8 import quantise
from speccompile.ops.cpu.library import load_cpu_ops
from speccompile.ops.cpu.packing import Pack, WeightPacks
from speccompile.ops.cpu.rounded import check_pack, inputs_unrounded
from speccompile.ops.native import ROUNDED
from speccompile.utils.weight_forms import WeightForm, WeightForms
from support.errors import raises
from support.experts import EXPERTS, case

assert load_cpu_ops("rounded") is None

expert_linear = torch.ops.speccompile.expert_linear
forms = pytest.mark.parametrize("form", ROUNDED)


def packs_of(form: WeightForm, weight: torch.Tensor) -> tuple[WeightPacks, Pack]:
    packs = WeightPacks(WeightForms(form))
    return packs, packs.of("experts.weight", weight)


def rounded(x: torch.Tensor) -> torch.Tensor:
    numbers, units = quantise(x.flatten(0, -2))
    return (numbers * units[..., None]).flatten(1)[:, : x.shape[-1]].view(x.shape)


def product(x: torch.Tensor, experts: torch.Tensor, pack: Pack, bias: torch.Tensor | None) -> torch.Tensor:
    return pack.form.expert_linear(x, experts, *pack.tensors, bias, pack.features)


@forms
@pytest.mark.parametrize("own", [False, True], ids=["of a token", "of a pair"])
@pytest.mark.parametrize(("depth", "features"), [(65, 70), (128, 33), (64, 300), (40, 7)])
def test_it_is_the_definition_over_unpacked_weights_and_rounded_inputs(
    form: WeightForm, own: bool, depth: int, features: int
) -> None:
    x, experts, weight, bias, _ = case(9, own=own, transposed=False, biased=own, depth=depth, features=features)
    _, pack = packs_of(form, weight)
    assert pack.shape == weight.shape and pack.unpack().shape == weight.shape
    wanted = expert_linear(rounded(x), experts, pack.unpack(), bias, False)
    torch.testing.assert_close(product(x, experts, pack, bias), wanted, rtol=1e-5, atol=1e-5)
    # Each expert is what a linear of it would be.
    for expert, matrix in enumerate(pack.matrices()):
        alone = WeightPacks(WeightForms(form)).of("linear.weight", weight[expert])
        assert all(torch.equal(a, b) for a, b in zip(matrix.tensors, alone.tensors, strict=True))


@forms
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_results_have_the_dtype_of_the_inputs(form: WeightForm, dtype: torch.dtype) -> None:
    x, experts, weight, bias, _ = case(3, own=False, transposed=False, biased=True, dtype=dtype)
    _, pack = packs_of(form, weight)
    assert bias is not None
    wanted = product(x.float(), experts, pack, bias.float()).to(dtype)
    assert torch.equal(product(x, experts, pack, bias), wanted)


@forms
@given(tokens=st.integers(1, 60), own=st.booleans(), seed=st.integers(0, 99))
def test_a_pair_has_the_same_bits_at_any_width(form: WeightForm, tokens: int, own: bool, seed: int) -> None:
    x, experts, weight, bias, _ = case(tokens, own=own, transposed=False, biased=True, depth=65 + seed, seed=seed)
    _, pack = packs_of(form, weight)
    whole = product(x, experts, pack, bias)
    first = seed % tokens
    for part in (slice(first, first + 1), slice(first, None), slice(None, first + 1)):
        assert torch.equal(product(x[part], experts[part], pack, bias), whole[part])


@forms
def test_without_rounded_inputs_it_is_the_definition_over_unpacked_weights(form: WeightForm) -> None:
    x, experts, weight, bias, _ = case(9, own=True, transposed=False, biased=True)
    packs, pack = packs_of(form, weight)
    wanted = expert_linear(x, experts, pack.unpack(), bias, False)
    with inputs_unrounded(packs):
        # What a graph calls, and what the model itself calls over its own weight.
        torch.testing.assert_close(product(x, experts, pack, bias), wanted, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(expert_linear(x, experts, weight, bias, False), wanted, rtol=1e-5, atol=1e-5)


@forms
def test_the_check_of_rounding_reads_every_expert(form: WeightForm) -> None:
    _, _, weight, _, _ = case(1, own=False, transposed=False, biased=False)
    _, pack = packs_of(form, weight)
    check_pack("experts.weight", pack)
    weight[EXPERTS - 1] += 1
    with raises(LoweringError, pack="experts.weight"):
        check_pack("experts.weight", pack)


@forms
def test_sizes_that_do_not_fit_are_errors(form: WeightForm) -> None:
    x, experts, weight, bias, _ = case(2, own=False, transposed=False, biased=True)
    _, pack = packs_of(form, weight)
    assert bias is not None
    with pytest.raises(RuntimeError, match="the sizes do not fit"):
        product(x, experts, pack, bias[1:])
    with pytest.raises(RuntimeError, match="the sizes do not fit"):
        product(x[:1], experts, pack, None)
    with pytest.raises(RuntimeError, match="experts must be >= 0, got -1"):
        product(x, torch.full_like(experts, -1), pack, None)

"""Linears of chosen experts: the definition, C++ against it, and the bits of a pair in any company."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import speccompile.ops  # noqa: F401  defines the ops
from speccompile.ops.cpu.library import load_cpu_ops
from support.experts import CHOSEN, EXPERTS, case

assert load_cpu_ops("experts") is None

OPS = torch.ops.speccompile
FORMS = ("expert_linear", "native_expert_linear")
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("transposed", [False, True], ids=["rows", "columns"])
def test_each_pair_is_multiplied_by_its_own_expert(form: str, dtype: torch.dtype, transposed: bool) -> None:
    """Depths and features that fill no vector and no block, and such that are several."""
    sizes = [(1, 65, 70), (5, 300, 33), (40, 96, 64), (3, 7, 5), (2, 2100, 96), (30, 70, 600)]
    for seed, (tokens, depth, features) in enumerate(sizes):
        own, biased = seed % 2 == 0, seed % 3 == 0
        x, experts, weight, bias, _ = given = case(
            tokens,
            own=own,
            transposed=transposed,
            biased=biased,
            depth=depth,
            features=features,
            dtype=dtype,
            seed=seed,
        )
        got = getattr(OPS, form)(*given)
        assert got.dtype == dtype and got.shape == (tokens, CHOSEN, features)
        for token in range(tokens):
            for place, expert in enumerate(experts[token].tolist()):
                wanted = torch.zeros(features, dtype=torch.float64)
                if expert < EXPERTS:
                    matrix = weight[expert].double().t() if transposed else weight[expert].double()
                    wanted = matrix @ (x[token, place] if own else x[token]).double()
                    wanted = wanted if bias is None else wanted + bias[expert].double()
                limit = TOLERANCE[dtype] * max(1.0, float(wanted.abs().max()))
                assert float((got[token, place].double() - wanted).abs().max()) <= limit


@settings(deadline=None, max_examples=40)
@given(
    tokens=st.integers(1, 60),
    own=st.booleans(),
    transposed=st.booleans(),
    biased=st.booleans(),
    seed=st.integers(0, 99),
)
def test_a_pair_has_the_same_bits_at_any_width(
    tokens: int, own: bool, transposed: bool, biased: bool, seed: int
) -> None:
    x, experts, *rest = case(tokens, own=own, transposed=transposed, biased=biased, depth=65 + seed, seed=seed)
    whole = OPS.native_expert_linear(x, experts, *rest)
    first = seed % tokens
    for part in (slice(first, first + 1), slice(first, None), slice(None, first + 1)):
        assert torch.equal(OPS.native_expert_linear(x[part], experts[part], *rest), whole[part])


@pytest.mark.parametrize("form", FORMS)
def test_what_is_not_a_number_stays_in_its_own_token_and_expert(form: str) -> None:
    x, experts, weight, bias, transposed = case(6, own=False, transposed=False, biased=True)
    experts[:, 0].fill_(0)
    experts[0].fill_(1)
    expected = getattr(OPS, form)(x, experts, weight, bias, transposed)
    x[0].fill_(torch.nan)
    weight[3].fill_(torch.inf)
    got = getattr(OPS, form)(x, experts, weight, bias, transposed)
    unchanged = experts[1:] != 3
    assert torch.equal(got[1:][unchanged], expected[1:][unchanged]) and bool(got[0].isnan().all())


@pytest.mark.parametrize("form", FORMS)
def test_a_negative_expert_is_an_error(form: str) -> None:
    x, experts, *rest = case(2, own=False, transposed=False, biased=False)
    experts[1, 2].fill_(-1)
    with pytest.raises(RuntimeError, match="experts must be >= 0, got -1"):
        getattr(OPS, form)(x, experts, *rest)

"""The likeliest tokens of a place: the C++ op against the definition, and the first of them against ``choose``."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from speccompile.ops.cpu.library import load_cpu_ops
from speccompile.ops.likeliest import likeliest

assert load_cpu_ops() is None

OPS = torch.ops.speccompile
cases = st.fixed_dictionaries(
    {
        "rows": st.integers(1, 3),
        "width": st.integers(1, 3),
        "vocab": st.sampled_from([3, 16, 63, 64, 65, 200]),
        "dtype": st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
        "forbidden": st.sampled_from([0.0, 0.5, 0.97, 1.0]),
        "noisy": st.booleans(),
        "seed": st.integers(0, 10**6),
    }
)


def arguments(
    *, rows: int, width: int, vocab: int, dtype: torch.dtype, forbidden: float, noisy: bool, seed: int
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    scores = (3 * torch.randn((rows, width, vocab), generator=generator)).to(dtype)
    scores[torch.rand(scores.shape, generator=generator) < forbidden] = float("-inf")
    temperature = torch.tensor([0.0, 0.7, 1.5])[:rows]
    seeds = torch.randint(10**9, (rows,), generator=generator)
    positions = torch.randint(500, (rows, width), generator=generator)
    return scores, [temperature, seeds, positions] if noisy else []


@settings(deadline=None, max_examples=150)
@given(cases, st.integers(1, 3))
def test_the_op_is_the_definition(case: dict[str, Any], count: int) -> None:
    scores, noise = arguments(**case)
    before = scores.clone()
    wanted, wanted_logprobs = likeliest(scores, count, *noise)
    tokens, logprobs = OPS.likeliest(scores, count, *noise)
    assert torch.equal(scores, before)
    torch.testing.assert_close(logprobs, wanted_logprobs, rtol=1e-4, atol=1e-4)
    # Two Gumbels may change places where they are equal but for their last bits.
    close = wanted_logprobs.diff(dim=-1).abs() < 1e-4 if noise else torch.zeros_like(wanted_logprobs[..., 1:]).bool()
    if not close.any():
        assert torch.equal(tokens, wanted)


@settings(deadline=None, max_examples=60)
@given(cases)
def test_the_first_one_is_what_choose_draws(case: dict[str, Any]) -> None:
    scores, noise = arguments(**case)
    tokens, logprobs = OPS.likeliest(scores, 2, *noise)
    assert torch.equal(tokens[..., 0], OPS.choose(scores, *noise, forbids=True))
    assert (logprobs.exp().sum(-1) < 1.0001).all() and (logprobs[..., 0] >= logprobs[..., 1]).all()


@pytest.mark.parametrize("op", [likeliest, OPS.likeliest], ids=["definition", "C++"])
def test_of_equal_ones_the_first_and_no_token_beside_what_is_no_number(op: Any) -> None:
    scores = torch.zeros(1, 3, 100)
    scores[0, 1, 70], scores[0, 2, 3] = float("nan"), float("inf")
    tokens, logprobs = op(scores, 3)
    assert tokens.tolist() == [[[0, 1, 2], [-1, -1, -1], [-1, -1, -1]]]
    torch.testing.assert_close(logprobs[0, 0].exp(), torch.full((3,), 0.01))
    assert logprobs[0, 1:].isneginf().all()


def test_more_than_there_are_is_refused() -> None:
    with pytest.raises(RuntimeError, match="4 of 3 tokens"):
        OPS.likeliest(torch.zeros(1, 1, 3), 4)


def test_opcheck() -> None:
    scores, noise = arguments(rows=2, width=2, vocab=20, dtype=torch.float32, forbidden=0.5, noisy=True, seed=1)
    checks = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")
    torch.library.opcheck(OPS.likeliest.default, (scores, 2, *noise), test_utils=checks)

"""The kernels that choose tokens against noise and argmax as they are defined (run by test_interpreted.py)."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from speccompile.ops import noise
from speccompile.ops.choose import reference
from speccompile.ops.triton import choose as module
from speccompile.ops.triton.choose import BLOCK, SPAN, bits_of, choose, gumbel_of, key_of
from support import triton_interpreter  # noqa: F401
from support.choice_cases import ChoiceCase, choice_cases


@triton.jit
def draw(seed, stream, position, start, bits, gumbels, COUNT: tl.constexpr):  # type: ignore[no-untyped-def]
    ids = tl.arange(0, COUNT)
    since = None
    if start is not None:
        since = tl.load(start)
    drawn = bits_of(key_of(tl.load(seed), stream, tl.load(position), since), ids)
    tl.store(bits + ids, drawn.to(tl.int32, bitcast=True))
    tl.store(gumbels + ids, gumbel_of(drawn))


@settings(deadline=None, max_examples=12)
@given(
    seed=st.integers(0, noise.SEEDS - 1),
    stream=st.integers(0, 4),
    position=st.integers(0, 2**20),
    start=st.none() | st.integers(0, 2**20),
)
def test_noise_is_the_defined_one(seed: int, stream: int, position: int, start: int | None) -> None:
    """Integers bit for bit; Gumbels to 4 ulp of the definition's own float32 uniforms."""
    count = 256
    bits, gumbels = torch.empty(count, dtype=torch.int32), torch.empty(count)
    since = None if start is None else torch.tensor([start])
    draw[1,](torch.tensor([seed]), stream, torch.tensor([position]), since, bits, gumbels, COUNT=count)
    expected = noise.bits(noise.keys(torch.tensor([seed]), stream, torch.tensor([[position]]), since), count)[0, 0]
    assert torch.equal(bits, expected)
    within_4_ulp(gumbels, expected)


@triton.jit
def gumbels_of(bits, gumbels, COUNT: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.arange(0, COUNT)
    tl.store(gumbels + at, gumbel_of(tl.load(bits + at).to(tl.uint32, bitcast=True)))


def within_4_ulp(gumbels: torch.Tensor, bits: torch.Tensor) -> None:
    exact = -(-torch.log1p(-noise.uniform(bits).double())).log()
    # Near 0 the last log is of a number near 1, whose own rounding is what remains.
    ulp = torch.maximum(torch.nextafter(exact.float().abs(), torch.tensor(torch.inf)) - exact.float().abs(), EPSILON)
    assert ((gumbels.double() - exact).abs() <= 4 * ulp.double()).all()


EPSILON = torch.tensor(2.0**-24)


def test_gumbels_at_both_ends() -> None:
    few = [0, 1, 2, 3, 4, 100, 2**24, 2**31 - 2, 2**31 - 1, 2**30, 2**16, -1, -2, -3, -(2**31), -(2**30)]
    bits = torch.tensor(few, dtype=torch.int32)
    gumbels = torch.empty(16)
    gumbels_of[1,](bits, gumbels, COUNT=16)
    assert gumbels.isfinite().all()
    within_4_ulp(gumbels, bits)


@settings(deadline=None, max_examples=12, phases=[Phase.explicit, Phase.generate])
@given(choice_cases([1, 2, 100, BLOCK, BLOCK + 1, SPAN, SPAN + 3, 3 * SPAN - 1]))
def test_tokens_are_the_defined_ones(case: ChoiceCase) -> None:
    scores, arguments = case.scores(), case.draws(noise.RESIDUAL)
    for first in (0, case.first):
        own = scores[..., first:], *arguments, case.forbids, first
        assert torch.equal(choose(*own), reference(*own))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_without_noise_the_first_of_the_greatest(dtype: torch.dtype) -> None:
    scores = torch.zeros(1, 3, 2 * SPAN + 10, dtype=dtype)
    scores[0, 0, [SPAN - 1, SPAN, 2 * SPAN]] = 1
    scores[0, 1] = float("-inf")
    scores[0, 2, [5, 5 + BLOCK, 7 + BLOCK]] = float("inf")
    assert choose(scores).tolist() == [[SPAN - 1, 0, 5]]
    assert choose(scores, forbids=True).tolist() == [[SPAN - 1, -1, 5]]


def test_many_splits(monkeypatch: pytest.MonkeyPatch) -> None:
    """More than the second kernel takes in one go."""
    monkeypatch.setattr(module, "SPLITS", 2)
    scores = torch.randn(1, 2, 5 * SPAN)
    assert torch.equal(choose(scores), scores.argmax(-1))

"""Typical-p as a search against the processor (run by test_interpreted.py)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from speccompile.ops.triton import typical as module
from speccompile.ops.triton.typical import mask_untypical_scores
from speccompile.sampling.typical_p import TypicalP
from support import triton_interpreter  # noqa: F401


@pytest.fixture(scope="module", autouse=True)
def small_blocks() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "BLOCK", 32)
        yield


@settings(deadline=None, max_examples=8, phases=[Phase.explicit, Phase.generate])
@given(
    rows=st.integers(1, 3),
    vocab=st.sampled_from([1, 7, 32, 100]),
    levels=st.sampled_from([3, 1000]),
    mass=st.lists(st.sampled_from([0.0123, 0.3141, 0.777, 1.0]), min_size=3, max_size=3),
    seed=st.integers(0, 10**6),
)
def test_scores_that_stay(rows: int, vocab: int, levels: int, mass: list[float], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randint(-levels, levels + 1, (rows, 3, vocab), generator=generator) * (3 / levels)
    scores[torch.rand(scores.shape, generator=generator) < 0.2] = float("-inf")
    scores[..., 0] = 0.5
    got, expected, wanted = scores[:, :2].clone(), scores[:, :2].clone(), torch.tensor(mass[:rows])
    mask_untypical_scores(got, wanted)
    nothing = torch.zeros(rows, 1, dtype=torch.int64)
    TypicalP().apply(expected, nothing, nothing[:, 0], wanted)
    assert torch.equal(got, expected)


def test_what_is_not_finite() -> None:
    inf, nan, wanted = float("inf"), float("nan"), torch.tensor([0.5])
    for row in ([-inf] * 3, [1.0, inf, 2.0]):
        scores = torch.tensor([[row]])
        mask_untypical_scores(scores, wanted)
        assert torch.equal(scores, torch.tensor([[row]]))
    scores = torch.tensor([[[1.0, nan, 2.0]]])
    mask_untypical_scores(scores, wanted)
    assert scores[0, 0, 1].isnan()

"""What is nearly the most likely token: the kernel against its definition (run by test_interpreted.py)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from speccompile.ops.triton import within_top as module
from speccompile.ops.triton.within_top import is_within_top
from speccompile.ops.within_top import reference
from support import triton_interpreter  # noqa: F401

generated = settings(deadline=None, max_examples=10, phases=[Phase.explicit, Phase.generate])


@pytest.fixture(scope="module", autouse=True)
def small_blocks() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "BLOCK", 32)
        yield


@generated
@given(
    rows=st.integers(1, 3),
    width=st.integers(0, 3),
    vocab=st.sampled_from([1, 7, 32, 33, 100]),
    levels=st.sampled_from([1, 5, 1000]),
    allowed=st.lists(st.sampled_from([-1.0, 0.0123, 0.3141, 0.777, float("inf")]), min_size=3, max_size=3),
    top_k=st.sampled_from([1, 2, 10, 200]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    seed=st.integers(0, 10**6),
)
def test_within_top(
    rows: int,
    width: int,
    vocab: int,
    levels: int,
    allowed: list[float],
    top_k: int,
    dtype: torch.dtype,
    seed: int,
) -> None:
    """Of few ``levels``, so that many are equal; some cannot come, one place has a NaN, the last belongs to no row."""
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randint(-levels, levels + 1, (rows, width + 1, vocab), generator=generator) * (3.7 / levels)
    scores[torch.rand(scores.shape, generator=generator) < 0.2] = float("-inf")
    if seed % 3 == 0:
        scores[0, 0, seed % vocab] = float("nan")
    likely = scores.nan_to_num(-1e9)[:, :width].topk(min(3, vocab), -1).indices[..., -1]
    anywhere = torch.randint(-2, vocab + 2, (rows, width), generator=generator)
    drafts = torch.where(torch.rand((rows, width), generator=generator) < 0.6, likely, anywhere)
    given = (scores.to(dtype), drafts, torch.tensor(allowed[:rows]), top_k)
    assert torch.equal(is_within_top(*given), reference(*given))


def test_places_need_not_lie_side_by_side() -> None:
    scores = torch.randn(2, 5, 40, generator=torch.Generator().manual_seed(1))
    drafts = scores.argmax(-1).repeat_interleave(2, 1)[:, ::2]
    given = (scores[:, 1:], drafts[:, 1:4], torch.tensor([0.0, -1.0]), 1)
    assert is_within_top(*given).tolist() == reference(*given).tolist() == [[True] * 3, [False] * 3]


def test_where_nothing_can_come() -> None:
    scores = torch.full((1, 1, 5), float("-inf"))
    given = (scores, torch.tensor([[2]]), torch.tensor([float("inf")]), 5)
    assert is_within_top(*given).tolist() == reference(*given).tolist() == [[False]]

"""What is nearly the most likely token, by sorting."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import speccompile.ops  # noqa: F401  defines the op

is_within_top = torch.ops.speccompile.is_within_top
INF = float("inf")


@given(
    st.lists(st.sampled_from([-INF, -1.5, 0.0, 0.25, 2.0]), min_size=1, max_size=7),
    st.integers(-2, 8),
    st.sampled_from([-1.0, 0.0, 0.11, 0.45, INF]),
    st.integers(1, 9),
)
def test_it_is_what_sorting_finds(scores: list[float], draft: int, allowed: float, top_k: int) -> None:
    row = torch.tensor(scores, dtype=torch.float64)
    probs = row.softmax(-1).tolist()
    best = sorted(range(len(scores)), key=lambda token: (-scores[token], token))
    within = draft in best[:top_k] and probs[draft] > 0 and probs[draft] >= max(probs) - allowed - 1e-9
    # Another row, and places after the drafts, belong to no row.
    places = torch.stack([torch.stack([row, row.flip(0)]), torch.full((2, len(scores)), 9.0).double()]).float()
    found = is_within_top(places, torch.tensor([[draft], [0]]), torch.tensor([allowed, -1.0]), top_k)
    assert found.tolist() == [[within], [False]]


@pytest.mark.parametrize("scores", [[1.0, float("nan"), 2.0], [-INF] * 3])
def test_where_nothing_is_sure_nothing_is_near(scores: list[float]) -> None:
    for draft in range(3):
        assert not is_within_top(torch.tensor([[scores]]), torch.tensor([[draft]]), torch.tensor([INF]), 3)


def test_without_drafts() -> None:
    assert is_within_top(torch.zeros(2, 1, 5), torch.zeros(2, 0, dtype=torch.int64), torch.ones(2), 3).shape == (2, 0)

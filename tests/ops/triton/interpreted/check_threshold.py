"""Top-k and top-p as a search against the processors (run by test_interpreted.py)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from speccompile.ops.triton import threshold as module
from speccompile.sampling.on_cuda import _on_cuda
from speccompile.sampling.top_k import TopK
from speccompile.sampling.top_p import TopP
from support import triton_interpreter  # noqa: F401
from support.nuclei import DYADIC, TRANSFORMERS, Nucleus, borders

generated = settings(deadline=None, max_examples=15, phases=[Phase.explicit, Phase.generate])


@pytest.fixture(scope="module", autouse=True)
def small_blocks() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "BLOCK", 32)
        yield


def both(processor: Any, scores: torch.Tensor, wanted: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    nothing = torch.zeros(len(scores), 1, dtype=torch.int64)
    got, expected = scores.clone(), scores.clone()
    _on_cuda(got, nothing, nothing[:, 0], 0, [wanted])
    processor.apply(expected, nothing, nothing[:, 0], wanted)
    return got, expected


def random_scores(rows: int, width: int, vocab: int, levels: int, seed: int) -> torch.Tensor:
    """Of few ``levels``, so that many are equal; some cannot come, and places after are not ours."""
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randint(-levels, levels + 1, (rows, width + 1, vocab), generator=generator) * 0.37
    scores[torch.rand(scores.shape, generator=generator) < 0.2] = float("-inf")
    scores[..., 0] = -0.0
    return scores[:, :width]


@generated
@given(
    rows=st.integers(1, 3),
    width=st.integers(1, 2),
    vocab=st.sampled_from([1, 7, 32, 33, 100]),
    levels=st.sampled_from([1, 5, 1000]),
    wanted=st.lists(st.integers(0, 120), min_size=3, max_size=3),
    seed=st.integers(0, 10**6),
)
def test_top_k(rows: int, width: int, vocab: int, levels: int, wanted: list[int], seed: int) -> None:
    scores = random_scores(rows, width, vocab, levels, seed)
    # Where no row wants it the processor is not asked.
    got, expected = both(TopK(), scores, torch.tensor([max(1, wanted[0]), *wanted[1:rows]]))
    assert torch.equal(got, expected)


@generated
@given(
    rows=st.integers(1, 3),
    width=st.integers(1, 2),
    vocab=st.sampled_from([1, 7, 32, 33, 100]),
    levels=st.sampled_from([3, 50, 1000]),
    wanted=st.lists(st.sampled_from([0.0123, 0.3141, 0.777, 0.9511, 1.0]), min_size=3, max_size=3),
    seed=st.integers(0, 10**6),
)
def test_top_p(rows: int, width: int, vocab: int, levels: int, wanted: list[float], seed: int) -> None:
    scores = random_scores(rows, width, vocab, levels, seed) * (3 / levels)
    got, expected = both(TopP(), scores, torch.tensor(wanted[:rows]))
    assert torch.equal(got, expected)


@pytest.mark.parametrize("case", [*TRANSFORMERS, *DYADIC], ids=str)
def test_top_p_keeps_as_few_as_make_up_the_mass(case: Nucleus) -> None:
    assert kept_by_both(case) == case.ids()


@generated
@given(case=borders())
def test_a_sum_that_equals_p_reaches_it(case: Nucleus) -> None:
    assert kept_by_both(case) == case.ids()


def kept_by_both(case: Nucleus) -> set[int]:
    got, expected = both(TopP(), case.scores(vocab=40), torch.tensor([case.top_p]))
    assert torch.equal(got, expected)
    return {*(got[0, 0] > float("-inf")).nonzero().flatten().tolist()}


@pytest.mark.parametrize("wanted", [torch.tensor([2]), torch.tensor([0.5])], ids=["top_k", "top_p"])
def test_what_is_not_finite(wanted: torch.Tensor) -> None:
    inf, nan = float("inf"), float("nan")
    for row in ([-inf] * 5, [1.0, nan, 2.0, 3.0, 0.0]):
        scores = torch.tensor([[row]])
        _on_cuda(scores, wanted, wanted, 0, [wanted])
        # A NaN is left for the choice to see, and where nothing can come nothing changes.
        assert torch.equal(scores.isnan(), torch.tensor([[row]]).isnan()) and (scores == -inf).sum() in (3, 5, 0)
    scores = torch.tensor([[[1.0, inf, 2.0, 3.0]]])
    _on_cuda(scores, wanted, wanted, 0, [wanted])
    assert scores[0, 0, 1] == inf and scores[0, 0, 0] == -inf

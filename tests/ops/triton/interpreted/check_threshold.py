"""Top-k, top-p and min-p as a search against the processors (run by test_interpreted.py)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from speccompile.ops.triton import threshold as module
from speccompile.ops.triton.draw import Filters, filter_scores
from speccompile.sampling.min_p import MinP
from speccompile.sampling.top_k import TopK
from speccompile.sampling.top_p import TopP
from support import triton_interpreter  # noqa: F401
from support.nuclei import DYADIC, TRANSFORMERS, Nucleus, borders

generated = settings(deadline=None, max_examples=8, phases=[Phase.explicit, Phase.generate])
VOCAB = st.sampled_from([1, 7, 64, 65, 200])


@pytest.fixture(scope="module", autouse=True)
def small_blocks() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "SPAN", 64)
        patch.setattr(module, "BLOCK", 32)
        yield


def by_processors(scores: torch.Tensor, **options: torch.Tensor) -> torch.Tensor:
    scores = scores.clone()
    nothing = torch.zeros(len(scores), 1, dtype=torch.int64)
    for name, processor in (("top_k", TopK()), ("top_p", TopP()), ("min_p", MinP())):
        # Where no row wants it the processor is not asked.
        if name in options and bool((options[name] != processor.state[0].fill).any()):
            processor.apply(scores, nothing, nothing[:, 0], options[name])
    return scores


def by_kernels(scores: torch.Tensor, **options: torch.Tensor) -> torch.Tensor:
    scores = scores.clone()
    filter_scores(scores, Filters(**options))
    return scores


def random_scores(rows: int, width: int, vocab: int, levels: int, seed: int, largest: float = 3.0) -> torch.Tensor:
    """Of few ``levels``, so that many are equal; some cannot come, and places after are not ours."""
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randint(-levels, levels + 1, (rows, width + 1, vocab), generator=generator) * (largest / levels)
    scores[torch.rand(scores.shape, generator=generator) < 0.2] = float("-inf")
    scores[..., 0] = -0.0
    return scores[:, :width]


@generated
@given(
    rows=st.integers(1, 3),
    width=st.integers(1, 2),
    vocab=VOCAB,
    levels=st.sampled_from([1, 5, 1000]),
    largest=st.sampled_from([1e-30, 0.4, 30.0, 3e38]),
    wanted=st.lists(st.integers(0, 220), min_size=3, max_size=3),
    seed=st.integers(0, 10**6),
)
def test_top_k(rows: int, width: int, vocab: int, levels: int, largest: float, wanted: list[int], seed: int) -> None:
    scores = random_scores(rows, width, vocab, levels, seed, largest)
    options = {"top_k": torch.tensor(wanted[:rows])}
    assert torch.equal(by_kernels(scores, **options), by_processors(scores, **options))


SHARES = st.sampled_from([0.0123, 0.3141, 0.777, 0.9511, 1.0])


@generated
@given(
    rows=st.integers(1, 3),
    width=st.integers(1, 2),
    vocab=VOCAB,
    levels=st.sampled_from([3, 50, 1000]),
    top_k=st.none() | st.lists(st.integers(0, 220), min_size=3, max_size=3),
    top_p=st.none() | st.lists(SHARES, min_size=3, max_size=3),
    min_p=st.none() | st.lists(st.sampled_from([0.0, 0.0123, 0.31]), min_size=3, max_size=3),
    seed=st.integers(0, 10**6),
)
def test_all_at_once_are_one_after_another(
    rows: int,
    width: int,
    vocab: int,
    levels: int,
    top_k: list[int] | None,
    top_p: list[float] | None,
    min_p: list[float] | None,
    seed: int,
) -> None:
    """Bit for bit, so a row of another kind of step draws the same token."""
    scores = random_scores(rows, width, vocab, levels, seed)
    given = {"top_k": top_k, "top_p": top_p, "min_p": min_p}
    options = {name: torch.tensor(values[:rows]) for name, values in given.items() if values is not None}
    together, apart = by_kernels(scores, **options), scores
    for name, values in options.items():
        apart = by_kernels(apart, **{name: values})
    assert torch.equal(together, apart)
    assert torch.equal(together, by_processors(scores, **options))


@pytest.mark.parametrize("case", [*TRANSFORMERS, *DYADIC], ids=str)
def test_top_p_keeps_as_few_as_make_up_the_mass(case: Nucleus) -> None:
    assert kept_by_both(case) == case.ids()


@generated
@given(case=borders())
def test_a_sum_that_equals_p_reaches_it(case: Nucleus) -> None:
    assert kept_by_both(case) == case.ids()


def kept_by_both(case: Nucleus) -> set[int]:
    scores, options = case.scores(vocab=40), {"top_p": torch.tensor([case.top_p])}
    got = by_kernels(scores, **options)
    assert torch.equal(got, by_processors(scores, **options))
    return {*(got[0, 0] > float("-inf")).nonzero().flatten().tolist()}


def test_a_nucleus_does_not_depend_on_the_split(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four programs, and one."""
    scores = torch.randn(2, 2, 256, generator=torch.Generator().manual_seed(0))
    options = {"top_p": torch.tensor([0.9, 0.3]), "top_k": torch.tensor([40, 0])}
    expected = by_kernels(scores, **options)
    monkeypatch.setattr(module, "SPAN", 256)
    assert torch.equal(by_kernels(scores, **options), expected)


@pytest.mark.parametrize(
    "options", [{"top_k": torch.tensor([2])}, {"top_p": torch.tensor([0.5])}, {"min_p": torch.tensor([0.9])}], ids=str
)
def test_what_is_not_finite(options: dict[str, torch.Tensor]) -> None:
    inf, nan = float("inf"), float("nan")
    assert by_kernels(torch.full((1, 1, 5), -inf), **options).isneginf().all()
    # A NaN is left for the choice to see.
    assert by_kernels(torch.tensor([[[1.0, nan, 2.0, 3.0, 0.0]]]), **options)[0, 0, 1].isnan()
    scores = by_kernels(torch.tensor([[[1.0, inf, 2.0, 3.0]]]), **options)
    assert scores[0, 0, 1] == inf and scores[0, 0, 0] == -inf

"""N-gram match, acceptance and commit as kernels against the functions that steps run (run by test_interpreted.py)."""

from __future__ import annotations

import pytest
import torch
from hypothesis import Phase, given, settings

from speccompile.ops.commit import _on_cuda
from speccompile.ops.triton import ngram
from support import triton_interpreter  # noqa: F401
from support.step_cases import Match, Outcome, matches, outcomes

generated = settings(deadline=None, max_examples=80, phases=[Phase.explicit, Phase.generate])


@pytest.fixture(scope="module", autouse=True)
def small_spans() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ngram, "SPAN", 8)
        yield


@generated
@given(matches)
def test_ngram_match(match: Match) -> None:
    for one, other in zip(ngram.match(*match.arguments), match.expected, strict=True):
        assert one.dtype is other.dtype and torch.equal(one, other)


@generated
@given(outcomes)
def test_accept_and_commit(outcome: Outcome) -> None:
    expected = outcome.expected()
    _on_cuda(*outcome.arguments)
    for name, value in outcome.state.items():
        assert torch.equal(value, expected[name]), name

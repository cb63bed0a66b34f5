"""Ops of a step around its target as kernels against the functions that steps run (run by test_interpreted.py)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import Phase, given, settings

from speccompile.ops import step_inputs as inputs_op
from speccompile.ops import store_drafts as store_op
from speccompile.ops.on_cuda import cuda_kernel
from speccompile.ops.triton import ngram
from support import triton_interpreter  # noqa: F401
from support.input_cases import input_cases, stored_cases
from support.step_cases import Match, Outcome, matches, outcomes

generated = settings(deadline=None, max_examples=30, phases=[Phase.explicit, Phase.generate])


@pytest.fixture(scope="module", autouse=True)
def small_spans() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ngram, "SPAN", 8)
        yield


def on_cuda(op: str) -> Callable[..., Any]:
    kernel = cuda_kernel(getattr(torch.ops.speccompile, op).default)
    assert kernel is not None
    return kernel


@generated
@given(matches)
def test_ngram_match(match: Match) -> None:
    for one, other in zip(ngram.match(*match.arguments), match.expected, strict=True):
        assert one.dtype is other.dtype and torch.equal(one, other)


@generated
@given(outcomes)
def test_accept_and_commit(outcome: Outcome) -> None:
    expected = outcome.expected()
    on_cuda("accept_commit_")(*outcome.arguments)
    for name, value in outcome.state.items():
        assert torch.equal(value, expected[name]), name


def test_step_inputs() -> None:
    for case in input_cases():
        for one, other in zip(on_cuda("step_inputs")(*case), inputs_op.reference(*case), strict=True):
            assert one.dtype is other.dtype and torch.equal(one, other)


def test_store_drafts() -> None:
    for case in stored_cases():
        own, expected = [item.clone() for item in case], [item.clone() for item in case]
        on_cuda("store_drafts_")(*own)
        store_op.reference(*expected)
        assert all(torch.equal(one, other) for one, other in zip(own, expected, strict=True))

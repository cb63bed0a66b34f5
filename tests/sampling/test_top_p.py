"""Top-p keeps as few of the most likely tokens as make up p: the processor with torch's ops and with the C++ ops."""

from __future__ import annotations

from collections.abc import Callable
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from transformers.generation.logits_process import TopPLogitsWarper

from speccompile.ops.cpu.library import load_cpu_ops
from speccompile.ops.greatest import greatest, greatest_share, mask_below
from speccompile.sampling.top_p import TopP
from support.nuclei import DYADIC, TRANSFORMERS, Nucleus, borders

PROCESSOR = TopP()


def with_cpp(scores: torch.Tensor, top_p: float) -> torch.Tensor:
    assert load_cpu_ops() is None
    PROCESSOR.op(scores, *nothing(), 0, [torch.tensor([top_p])])
    return scores


def with_torch(scores: torch.Tensor, top_p: float) -> torch.Tensor:
    """With the references of the ops, which run where no C++ library can be built."""
    references = {"greatest": greatest, "greatest_share": greatest_share, "mask_below_": mask_below}
    with patch.multiple(torch.ops.speccompile, **references):
        return with_cpp(scores, top_p)


def by_transformers(scores: torch.Tensor, top_p: float) -> torch.Tensor:
    return TopPLogitsWarper(top_p)(None, scores[0])[None]


def nothing() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.zeros(1, 1, dtype=torch.int64), torch.ones(1, dtype=torch.int64)


def kept_ids(scores: torch.Tensor) -> set[int]:
    return {*(scores[0, 0] > float("-inf")).nonzero().flatten().tolist()}


Implementation = Callable[[torch.Tensor, float], torch.Tensor]
OURS = pytest.mark.parametrize("implementation", [with_torch, with_cpp])


@OURS
@pytest.mark.parametrize("case", [*TRANSFORMERS, *DYADIC], ids=str)
def test_top_p_keeps_as_few_as_make_up_the_mass(implementation: Implementation, case: Nucleus) -> None:
    assert kept_ids(implementation(case.scores(), case.top_p)) == case.ids()
    assert kept_ids(by_transformers(case.scores(), case.top_p)) == case.ids()


@OURS
@pytest.mark.parametrize(("scale", "kept"), [(1.0, 3), (100.0, 1)])
def test_top_p_of_a_ramp_is_that_of_transformers(implementation: Implementation, scale: float, kept: int) -> None:
    """The second half of transformers' test_top_p_dist_warper, whose 100-fold ramp keeps one token more because of
    ``min_tokens_to_keep=2``."""
    ramp = (torch.arange(10.0) - 5)[None, None] * scale
    assert kept_ids(implementation(ramp, 0.9)) == {*range(10 - kept, 10)}


@OURS
@given(case=borders())
@settings(max_examples=200, deadline=None)
def test_a_sum_that_equals_p_reaches_it(implementation: Implementation, case: Nucleus) -> None:
    """transformers and sums of float32 without a tolerance keep one token more in about every fifth example."""
    assert kept_ids(implementation(case.scores(), case.top_p)) == case.ids()


@OURS
@given(case=borders(away=True))
@settings(max_examples=200, deadline=None)
def test_away_from_sums_that_equal_p_it_keeps_what_transformers_keeps(
    implementation: Implementation, case: Nucleus
) -> None:
    assert kept_ids(implementation(case.scores(), case.top_p)) == case.ids()
    assert kept_ids(by_transformers(case.scores(), case.top_p)) == case.ids()


@OURS
def test_scores_equal_to_the_last_that_is_needed_stay(implementation: Implementation) -> None:
    """The documented difference: transformers keeps two of these, by the order of its sort."""
    case = Nucleus((2, 4, 2, 2), 0.5, 4)
    assert kept_ids(implementation(case.scores(), case.top_p)) == {0, 1, 2, 3}
    assert len(kept_ids(by_transformers(case.scores(), case.top_p))) == 2


@OURS
def test_a_border_far_into_a_large_vocabulary(implementation: Implementation) -> None:
    """Past the first look of 256 tokens, where the sum has been rounded several hundred times."""
    case = Nucleus((*range(1200, 0, -1),), float(sum(range(801, 1201)) / sum(range(1, 1201))), 400)
    assert kept_ids(implementation(case.scores(vocab=5000), case.top_p)) == case.ids()

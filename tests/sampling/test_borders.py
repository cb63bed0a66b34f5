"""Min-p and typical-p at probabilities and sums that equal the option exactly: fractions say which tokens stay."""

from __future__ import annotations

import itertools
import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LogitsProcessor, MinPLogitsWarper, TypicalLogitsWarper

from speccompile.ops.cpu.library import load_cpu_ops
from speccompile.sampling.min_p import MinP
from speccompile.sampling.typical_p import TypicalP
from support.nuclei import Nucleus

WEIGHTS = st.lists(st.integers(1, 400), min_size=2, max_size=16, unique=True)
#: Added to all scores, which changes no probability, but what rounding takes off.
SHIFTS = st.sampled_from([0.0, 5.0, -5.0])


def by_distance(weights: list[int]) -> list[tuple[float, int]]:
    """How far each id's information is from the entropy, in double precision, and the id; the nearest first."""
    shares = [weight / sum(weights) for weight in weights]
    entropy = -math.fsum(share * math.log(share) for share in shares)
    return sorted((abs(-math.log(share) - entropy), item) for item, share in enumerate(shares))


def apart(drawn: tuple[list[int], int]) -> bool:
    """Whether float32 orders the distances as they are."""
    distances = [distance for distance, _ in by_distance(drawn[0])]
    return min(b - a for a, b in itertools.pairwise(distances)) > 1e-5


#: Weights, and how many of the nearest stay.
TYPICAL = WEIGHTS.flatmap(lambda drawn: st.tuples(st.just(drawn), st.integers(1, len(drawn) - 1))).filter(apart)


def scores_of(weights: list[int], shift: float) -> torch.Tensor:
    return Nucleus(tuple(weights), 1.0, 0).scores() + shift


def kept(scores: torch.Tensor) -> set[int]:
    return {*(scores.flatten() > float("-inf")).nonzero().flatten().tolist()}


def ours(op: torch._ops.OpOverload, scores: torch.Tensor, value: float) -> set[int]:
    scores = scores.clone()
    op(scores, torch.zeros(1, 1, dtype=torch.int64), torch.ones(1, dtype=torch.int64), 0, [torch.tensor([value])])
    return kept(scores)


def theirs(warper: LogitsProcessor, scores: torch.Tensor) -> set[int]:
    return kept(warper(None, scores[0].clone()))


@pytest.fixture(scope="module", autouse=True)
def _cpp_ops() -> None:
    assert load_cpu_ops() is None


@given(weights=WEIGHTS, shift=SHIFTS, data=st.data())
@settings(max_examples=300, deadline=None)
def test_a_probability_that_equals_the_share_stays(weights: list[int], shift: float, data: st.DataObject) -> None:
    last = data.draw(st.sampled_from(weights))
    expected = {item for item, weight in enumerate(weights) if weight >= last}
    assert ours(MinP().op, scores_of(weights, shift), last / max(weights)) == expected


@given(weights=WEIGHTS, shift=SHIFTS, data=st.data())
@settings(max_examples=300, deadline=None)
def test_away_from_equal_probabilities_min_p_is_that_of_transformers(
    weights: list[int], shift: float, data: st.DataObject
) -> None:
    share = Fraction(data.draw(st.sampled_from(weights)), max(weights))
    share *= 1 + data.draw(st.sampled_from([-1, 1])) * Fraction(1, data.draw(st.integers(2000, 9000)))
    scores, value = scores_of(weights, shift), min(1.0, float(share))
    expected = theirs(MinPLogitsWarper(value), scores)
    assert ours(MinP().op, scores, value) == expected


@given(drawn=TYPICAL, shift=SHIFTS)
@settings(max_examples=300, deadline=None)
def test_a_typical_sum_that_equals_p_reaches_it(drawn: tuple[list[int], int], shift: float) -> None:
    weights, count = drawn
    nearest = [item for _, item in by_distance(weights)[:count]]
    mass = Fraction(sum(weights[item] for item in nearest), sum(weights))
    assert ours(TypicalP().op, scores_of(weights, shift), float(mass)) == {*nearest}


@given(drawn=TYPICAL, shift=SHIFTS, part=st.integers(2, 10))
@settings(max_examples=300, deadline=None)
def test_away_from_equal_sums_typical_p_is_that_of_transformers(
    drawn: tuple[list[int], int], shift: float, part: int
) -> None:
    weights, count = drawn
    nearest = [item for _, item in by_distance(weights)[:count]]
    mass = Fraction(sum(weights[item] for item in nearest)) - Fraction(weights[nearest[-1]], part)
    scores, value = scores_of(weights, shift), float(mass / sum(weights))
    assert ours(TypicalP().op, scores, value) == theirs(TypicalLogitsWarper(value), scores) == {*nearest}

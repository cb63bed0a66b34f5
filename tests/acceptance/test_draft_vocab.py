"""U13: a drafter whose vocabulary is a part of the target's. What it cannot draw still comes as often as it should."""

from __future__ import annotations

import itertools
import re
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from speccompile.acceptance import Block, Rejection
from speccompile.errors import InvalidInput
from speccompile.ops import noise
from speccompile.sampling.draft_vocab import check_d2t, target_ids
from support.errors import raises
from support.rule_laws import (
    VOCAB,
    Bars,
    Judged,
    Table,
    distance,
    distance_of,
    heights,
    joint,
    law,
    play,
    ratios,
    table,
)
from support.rules import RULES

LOSSLESS = [(Rejection.judge, ratios), (Block.judge, heights)]
rules = pytest.mark.parametrize(("rule", "bars_of"), LOSSLESS, ids=["rejection", "block"])
parts = pytest.mark.parametrize("ids", list(itertools.combinations(range(VOCAB), 2)), ids=str)


def in_target_vocab(draft_probs: torch.Tensor, d2t: torch.Tensor, vocab: int) -> torch.Tensor:
    """``[..., V]`` of ``[..., Vd]``: tokens that the drafter cannot draw have q = 0."""
    mass = draft_probs.new_zeros((*draft_probs.shape[:-1], vocab))
    return mass.index_copy(-1, target_ids(d2t), draft_probs)


def offsets(ids: tuple[int, ...]) -> torch.Tensor:
    return torch.tensor(ids) - torch.arange(len(ids))


@given(st.data(), st.integers(2, 40))
@settings(max_examples=60, deadline=None)
def test_each_draft_token_keeps_its_probability(data: st.DataObject, vocab: int) -> None:
    ids = sorted(data.draw(st.sets(st.integers(0, vocab - 1), min_size=1)))
    d2t, q = offsets(tuple(ids)), torch.rand(2, 3, len(ids))
    check_d2t(d2t, vocab)
    assert target_ids(d2t).tolist() == ids
    whole = in_target_vocab(q, d2t, vocab)
    assert torch.equal(whole[..., ids], q)
    assert not whole[..., [token for token in range(vocab) if token not in ids]].any()


def part_of(ids: tuple[int, ...], seed: int) -> Table:
    """q after each text, over the target's vocabulary."""
    small = {text: probs[: len(ids)] / probs[: len(ids)].sum() for text, probs in table(seed).items()}
    return {text: in_target_vocab(probs, offsets(ids), VOCAB) for text, probs in small.items()}


@rules
@parts
@pytest.mark.parametrize("seed", range(3))
def test_the_targets_joint_distribution(rule: Judged, bars_of: Bars, ids: tuple[int, ...], seed: int) -> None:
    p, q = table(seed), part_of(ids, seed + 100)
    got = law(p, q, certain=False, rule=rule, bars_of=bars_of)
    assert distance(got, joint(p)) < 1e-12
    (missing,) = set(range(VOCAB)) - set(ids)
    assert all(chance > 0 for text, chance in got.items() if missing in text)


def within_the_part(*given_tensors: torch.Tensor, rule: Judged, ids: tuple[int, ...]) -> tuple[torch.Tensor, ...]:
    """Draws from what is left within the drafter's vocabulary, as a residual over that alone would."""
    accepted, left = rule(*given_tensors)
    kept = torch.zeros_like(left)
    kept[:, :-1, list(ids)] = left[:, :-1, list(ids)]
    kept[:, -1] = left[:, -1]
    return accepted, torch.where(kept.sum(-1, keepdim=True) > 0, kept, left)


@rules
def test_a_residual_over_the_draft_vocabulary_is_found(rule: Judged, bars_of: Bars) -> None:
    ids = (0, 2)
    p, q = table(1), part_of(ids, 101)
    unsound = partial(within_the_part, rule=rule, ids=ids)
    assert distance(law(p, q, certain=False, rule=unsound, bars_of=bars_of), joint(p)) > 1e-2


@rules
@pytest.mark.parametrize("nothing", [0.0, float("nan")], ids=str)
def test_a_draft_that_could_not_be_drawn_is_none(rule: Judged, bars_of: Bars, nothing: float) -> None:
    """Where a request forbids all of the drafter's vocabulary, or the drafter says NaN, something stands in the draft's
    place all the same. The coin would let it pass: q is 0."""
    probs = torch.full((1, 3, VOCAB), 1 / VOCAB)
    drafted = torch.full((1, 2, VOCAB), 1 / VOCAB)
    drafted[:, 1] = nothing
    accepted, left = rule(probs, torch.tensor([[2, 0]]), torch.tensor([2]), drafted, torch.zeros(1, 2))
    assert accepted.tolist() == [1]
    torch.testing.assert_close(left[:, 1] / left[:, 1].sum(), probs[:, 1])


@pytest.mark.parametrize("rule", list(RULES))
def test_many_rounds_through_the_hash(rule: str) -> None:
    rng = torch.Generator().manual_seed(5)
    p = torch.randn(4, 4, generator=rng, dtype=torch.float64).softmax(-1)
    small = torch.randn(4, 2, generator=rng, dtype=torch.float64).softmax(-1)
    q = in_target_vocab(small, offsets((1, 3)), 4)
    texts, rate = play(rule, "draws", p, q, noise.TOKENS if rule == "exact" else noise.DRAFTS)
    assert 0.05 < rate < 0.95
    assert set(texts.flatten().tolist()) == {0, 1, 2, 3}
    assert abs(distance_of(texts, p)) < 3.9


@pytest.mark.parametrize(
    ("d2t", "says"),
    [
        (torch.tensor([0, 0, 8]), "draft token 2 would be token 10 of the target, which has 0 .. 9"),
        (torch.tensor([-1, 0]), "draft token 0 would be token -1"),
        (torch.tensor([1, 0, 3]), "two draft tokens are the same"),
        (torch.tensor([0.0, 1.0]), "list of whole numbers"),
        (torch.tensor([[0, 1]]), "list of whole numbers"),
    ],
)
def test_offsets_of_another_target(d2t: torch.Tensor, says: str) -> None:
    with raises(InvalidInput, name="d2t", reason=re.compile(says)):
        check_d2t(d2t, 10)

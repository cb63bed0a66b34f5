"""Lossless rules emit what the target would: the joint distribution of sequences, exactly and through the hash."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from speccompile.acceptance import Block, Rejection
from speccompile.acceptance import coins as coins_module
from speccompile.ops import noise
from support.rule_laws import (
    TEXTS,
    VOCAB,
    Bars,
    Judged,
    K,
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


@pytest.mark.parametrize("certain", [False, True])
@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_rejection_emits_the_targets_joint_distribution(seed: int, zeros: bool, certain: bool) -> None:
    p, q = table(seed, zeros=zeros), table(seed + 100, zeros=zeros)
    got = law(p, q, certain=certain)
    assert distance(got, joint(p)) < 1e-12
    assert abs(sum(got.values()) - 1) < 1e-12


@pytest.mark.parametrize("certain", [False, True])
@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_block_emits_the_targets_joint_distribution(seed: int, zeros: bool, certain: bool) -> None:
    p, q = table(seed, zeros=zeros), table(seed + 100, zeros=zeros)
    got = law(p, q, certain=certain, rule=Block.judge, bars_of=heights)
    assert distance(got, joint(p)) < 1e-12


def mean_accepted(p: Table, q: Table, rule: Judged, bars_of: Bars) -> float:
    """Draft tokens a step."""
    total = 0.0
    for drafts in itertools.product(range(VOCAB), repeat=K):
        drawn = math.prod(float(q[drafts[:i]][drafts[i]]) for i in range(K))
        probs = torch.stack([p[drafts[:i]] for i in range(K + 1)])[None]
        draft_probs = torch.stack([q[drafts[:i]] for i in range(K)])[None]
        bars = bars_of(probs, torch.tensor([drafts]), draft_probs)
        for outcome in itertools.product(*[[(bar / 2, bar), ((1 + bar) / 2, 1 - bar)] for bar in bars]):
            coins = torch.tensor([[coin for coin, _ in outcome]], dtype=torch.float64)
            accepted, _ = rule(probs, torch.tensor([drafts]), torch.tensor([K]), draft_probs, coins)
            total += drawn * math.prod(chance for _, chance in outcome) * int(accepted)
    return total


@pytest.mark.parametrize("seed", range(8))
def test_block_accepts_at_least_as_many_as_rejection(seed: int) -> None:
    p, q = table(seed), table(seed + 100)
    one_by_one = mean_accepted(p, q, Rejection.judge, ratios)
    assert mean_accepted(p, q, Block.judge, heights) >= one_by_one - 1e-12


def test_equal_distributions_accept_everything() -> None:
    p = table(1)
    probs = torch.stack([p[()], p[(0,)], p[(0, 1)]])[None]
    coins = torch.full((1, 2), 1 - 1e-9, dtype=torch.float64)
    for rule in (Rejection.judge, Block.judge):
        accepted, left = rule(probs, torch.tensor([[0, 1]]), torch.tensor([2]), probs[:, :2], coins)
        assert int(accepted) == 2 and torch.equal(left[0, 2], probs[0, 2])


def unsound_residual(*given: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Draws from p where a draft was refused."""
    return Rejection.judge(*given)[0], given[0]


def unsound_mass(
    probs: torch.Tensor, drafts: torch.Tensor, lens: torch.Tensor, q: torch.Tensor, coins: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Judges by q, and takes away the whole of the draft's own mass, as if it had been certain."""
    return Rejection.judge(probs, drafts, lens, q, coins)[0], Rejection.judge(probs, drafts, lens, None, coins)[1]


def unsound_update(
    probs: torch.Tensor, drafts: torch.Tensor, lens: torch.Tensor, q: torch.Tensor, coins: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The other way round: judges as if the draft had been certain, and takes q away."""
    return Rejection.judge(probs, drafts, lens, None, coins)[0], Rejection.judge(probs, drafts, lens, q, coins)[1]


def unsound_order(
    probs: torch.Tensor, drafts: torch.Tensor, lens: torch.Tensor, q: torch.Tensor, coins: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Looks at later drafts, as ``block`` does, and draws as ``rejection`` does."""
    return Block.judge(probs, drafts, lens, q, coins)[0], Rejection.judge(probs, drafts, lens, q, coins)[1]


def certain_ratios(probs: torch.Tensor, drafts: torch.Tensor, draft_probs: torch.Tensor | None) -> list[float]:
    return ratios(probs, drafts, None)


@pytest.mark.parametrize(
    ("rule", "bars_of"),
    [
        (unsound_residual, ratios),
        (unsound_mass, ratios),
        (unsound_update, certain_ratios),
        (unsound_order, heights),
    ],
)
def test_unsound_rules_are_found(rule: Judged, bars_of: Bars) -> None:
    p, q = table(1), table(101)
    assert distance(law(p, q, certain=False, rule=rule, bars_of=bars_of), joint(p)) > 1e-2


def at_most(
    probs: torch.Tensor, drafts: torch.Tensor, lens: torch.Tensor, q: torch.Tensor | None, coins: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """``rejection`` with ``<=``."""
    q = torch.ones_like(probs) if q is None else q
    p_at, q_at = (tensor[:, : drafts.shape[1]].gather(-1, drafts[..., None])[..., 0] for tensor in (probs, q))
    return (coins * q_at <= p_at).long().cumprod(1).sum(1), probs


@pytest.mark.parametrize(
    ("rule", "sound"),
    [(Rejection.judge, True), (Block.judge, True), (at_most, False)],
    ids=["rejection", "block", "<="],
)
def test_no_coin_accepts_what_has_no_probability(rule: Judged, sound: bool) -> None:
    """Not even one of 0, and not where the drafter says that it cannot have drawn it; 0 <= 0 would."""
    probs = torch.tensor([[[0.0, 1.0], [0.5, 0.5]]])
    draft, one = torch.tensor([[0]]), torch.tensor([1])
    certain = torch.tensor([[[1.0, 0.0]]])
    for q, coin in ((None, 0.0), (certain, 0.0), (torch.tensor([[[0.0, 1.0]]]), 0.5)):
        accepted, left = rule(probs, draft, one, q, torch.full((1, 1), coin))
        assert int(accepted) == (0 if sound else 1) and float(left[0, 0, 0]) == 0


# --- through the hash ----------------------------------------------------------------------------


@pytest.mark.parametrize("drafter", ["draws", "guesses"])
@pytest.mark.parametrize("rule", ["exact", "rejection", "block"])
def test_many_rounds_through_the_hash(rule: str, drafter: str) -> None:
    rng = torch.Generator().manual_seed(5)
    p, q = (torch.randn(4, 4, generator=rng, dtype=torch.float64).softmax(-1) for _ in range(2))
    texts, rate = play(rule, drafter, p, q, noise.TOKENS if rule == "exact" else noise.DRAFTS)
    assert 0.05 < rate < 0.95
    assert abs(distance_of(texts, p)) < 3.9


def test_drafts_whose_noise_comes_back_are_not_lossless_under_block() -> None:
    """Which drafts stay depends on those after them: these may not be drawn by the same noise again."""
    rng = torch.Generator().manual_seed(5)
    p, q = (torch.randn(4, 4, generator=rng, dtype=torch.float64).softmax(-1) for _ in range(2))
    texts, _ = play("block", "draws", p, q, noise.TOKENS)
    assert distance_of(texts, p) > 5


@pytest.mark.parametrize(("rule", "sound"), [("rejection", True), ("block", False)])
def test_coins_that_come_back_are_not_lossless_under_block(
    monkeypatch: pytest.MonkeyPatch, rule: str, sound: bool
) -> None:
    """A coin by position alone: one that refused a place is known to be high when the place is looked at again. Only
    ``block`` looks at places after the first one that it refuses."""
    flip = coins_module.coins

    def by_position(seed: torch.Tensor, stream: int, positions: torch.Tensor, start: torch.Tensor) -> torch.Tensor:
        return flip(seed, stream, positions, torch.zeros_like(start))

    monkeypatch.setattr(coins_module, "coins", by_position)
    rng = torch.Generator().manual_seed(5)
    p, q = (torch.randn(4, 4, generator=rng, dtype=torch.float64).softmax(-1) for _ in range(2))
    texts, _ = play(rule, "draws", p, q, noise.DRAFTS)
    assert abs(distance_of(texts, p)) < 3.9 if sound else distance_of(texts, p) > 5


def test_the_share_of_accepted_drafts() -> None:
    """``exact`` within its bounds, ``rejection`` at its optimum, 1 - TV."""
    rng = torch.Generator().manual_seed(8)
    places = torch.arange(TEXTS)
    for spread in (0.3, 1.0, 3.0):
        p = (spread * torch.randn(6, generator=rng)).softmax(-1)
        q = (spread * torch.randn(6, generator=rng)).softmax(-1)
        seed, start, ones = places, torch.full((TEXTS,), 3), torch.ones(TEXTS)
        drafts = (q.log() + noise.gumbel(seed, noise.TOKENS, start[:, None], 6)).argmax(-1)
        scores = p.log().expand(TEXTS, 2, 6).contiguous()
        lens = torch.ones(TEXTS, dtype=torch.int64)
        tv = float((p - q).abs().sum()) / 2
        rates = {}
        for rule in ("exact", "rejection", "block"):
            probs = q.expand(TEXTS, 1, 6)
            _, accepted = RULES[rule](scores, drafts, lens, start, ones, seed, probs)
            rates[rule] = float(accepted.double().mean())
        slack = 4 * 0.5 / math.sqrt(TEXTS)
        print(f"TV {tv:.3f}: bound {(1 - tv) / (1 + tv):.3f}, exact {rates['exact']:.3f}, ", end="")
        print(f"rejection {rates['rejection']:.3f}, 1 - TV {1 - tv:.3f}")
        assert (1 - tv) / (1 + tv) - slack < rates["exact"] < 1 - tv + slack
        assert abs(rates["rejection"] - (1 - tv)) < slack
        assert abs(rates["block"] - (1 - tv)) < slack

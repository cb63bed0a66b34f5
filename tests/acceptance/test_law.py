"""Lossless rules emit what the target would: the joint distribution of sequences, exactly and through the hash."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator

import pytest
import torch
from rules import RULES

from speccompile.acceptance import Block, Rejection
from speccompile.acceptance import coins as coins_module
from speccompile.acceptance.block import weigh
from speccompile.ops import noise

VOCAB = 3
K = 2
Table = dict[tuple[int, ...], torch.Tensor]
Law = dict[tuple[int, ...], float]


def table(seed: int, vocab: int = VOCAB, zeros: bool = False) -> Table:
    """A next-token distribution (float64) behind each text of up to K tokens."""
    rng = torch.Generator().manual_seed(seed)
    texts = (text for length in range(K + 1) for text in itertools.product(range(vocab), repeat=length))
    made = {}
    for text in texts:
        logits = 1.5 * torch.randn(vocab, generator=rng, dtype=torch.float64)
        if zeros:
            logits[int(torch.randint(vocab, (), generator=rng))] = float("-inf")
        made[text] = logits.softmax(-1)
    return made


def joint(p: Table) -> dict[tuple[int, ...], float]:
    return {text: math.prod(float(p[text[:i]][text[i]]) for i in range(K + 1)) for text in sequences()}


def sequences() -> Iterator[tuple[int, ...]]:
    return itertools.product(range(VOCAB), repeat=K + 1)


Judged = Callable[..., tuple[torch.Tensor, torch.Tensor]]
Bars = Callable[..., list[float]]


def ratios(probs: torch.Tensor, drafts: torch.Tensor, draft_probs: torch.Tensor | None) -> list[float]:
    """p/q of each draft, at most 1."""
    p = probs[:, :K].gather(-1, drafts[..., None])[0, :, 0]
    q = torch.ones(K) if draft_probs is None else draft_probs.gather(-1, drafts[..., None])[0, :, 0]
    return [min(1.0, float(a / b)) if b else 1.0 for a, b in zip(p, q, strict=True)]


def heights(probs: torch.Tensor, drafts: torch.Tensor, draft_probs: torch.Tensor | None) -> list[float]:
    return [float(height) for height in weigh(probs, drafts, torch.tensor([K]), draft_probs)[0][0]]


def law(
    p: Table, q: Table, *, certain: bool, rule: Judged = Rejection.judge, bars_of: Bars = ratios
) -> dict[tuple[int, ...], float]:
    """Of the first K+1 tokens when the drafts come from ``q``, by all drafts and all outcomes of the coins; what a step
    did not emit is drawn by the target later. ``certain``: the rule is not told q."""
    result = dict.fromkeys(sequences(), 0.0)
    for drafts in itertools.product(range(VOCAB), repeat=K):
        drawn = math.prod(float(q[drafts[:i]][drafts[i]]) for i in range(K))
        probs = torch.stack([p[drafts[:i]] for i in range(K + 1)])[None]
        draft_probs = None if certain else torch.stack([q[drafts[:i]] for i in range(K)])[None]
        # A coin is compared with one bar and nothing else: one below, and one above, if there is room.
        bars = bars_of(probs, torch.tensor([drafts]), draft_probs)
        sides = [[(bar / 2, bar), ((1 + bar) / 2, 1 - bar)] for bar in bars]
        for outcome in itertools.product(*sides):
            weight = drawn * math.prod(chance for _, chance in outcome)
            if not weight:
                continue
            coins = torch.tensor([[coin for coin, _ in outcome]], dtype=torch.float64)
            accepted, left = rule(probs, torch.tensor([drafts]), torch.tensor([K]), draft_probs, coins)
            a = int(accepted)
            bonus = left[0, a] / left[0, a].sum()
            for text in result:
                if text[:a] == drafts[:a]:
                    later = math.prod(float(p[text[:i]][text[i]]) for i in range(a + 1, K + 1))
                    result[text] += weight * float(bonus[text[a]]) * later
    return result


def distance(one: dict[tuple[int, ...], float], other: dict[tuple[int, ...], float]) -> float:
    return max(abs(one[text] - other[text]) for text in one)


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

TEXTS = 40_000
LONG = 4


def chi_square(counts: torch.Tensor, expected: torch.Tensor) -> float:
    """In standard deviations (Wilson and Hilferty); cells that expect fewer than 5 are put together."""
    rare = expected < 5
    counts = torch.cat([counts[~rare], counts[rare].sum()[None]]).double()
    expected = torch.cat([expected[~rare], expected[rare].sum()[None]])
    counts, expected = counts[expected > 0], expected[expected > 0]
    freedom = len(counts) - 1
    value = float(((counts - expected) ** 2 / expected).sum())
    return ((value / freedom) ** (1 / 3) - (1 - 2 / (9 * freedom))) / math.sqrt(2 / (9 * freedom))


def play(rule: str, drafter: str, p: torch.Tensor, q: torch.Tensor, stream: int) -> tuple[torch.Tensor, float]:
    """Texts of LONG tokens, one a seed, of a target that looks at its newest token alone (``p``, ``[V, V]``), round by
    round until all are there; and the share of accepted drafts."""
    vocab = len(p)
    seed = torch.arange(TEXTS) * 7919
    text = torch.zeros(TEXTS, LONG + K + 3, dtype=torch.int64)
    length = torch.ones(TEXTS, dtype=torch.int64)
    rows, ones = torch.arange(TEXTS), torch.ones(TEXTS)
    judged = passed = 0
    while int(length.min()) < LONG + 1:
        newest = text[rows, length - 1]
        drafts, probs, read = [], [], [newest]
        for i in range(K):
            logits = q[read[-1]].log()
            positions = (length + i)[:, None]
            if drafter == "draws":
                start = None if stream == noise.TOKENS else length
                drafts.append((logits + noise.gumbel(seed, stream, positions, vocab, start)[:, 0]).argmax(-1))
            else:
                drafts.append((positions[:, 0] * 7 + read[-1] + 1) % vocab)
            probs.append(q[read[-1]])
            read.append(drafts[-1])
        scores = torch.stack([p[token].log() for token in read], dim=1).float()
        drafted = torch.stack(drafts, dim=1)
        draft_probs = torch.stack(probs, dim=1).float() if drafter == "draws" else None
        lens = torch.where(length < LONG + 1, K, 0)
        tokens, accepted = RULES[rule](scores, drafted, lens, length, ones, seed, draft_probs)
        judged, passed = judged + int(lens.sum()), passed + int(accepted.sum())
        for i in range(K + 1):
            emitted = (i <= accepted) & (length < LONG + 1)
            text[rows[emitted], length[emitted]] = tokens[emitted, i]
            length = length + emitted
    return text[:, 1 : LONG + 1], passed / judged


@pytest.mark.parametrize("drafter", ["draws", "guesses"])
@pytest.mark.parametrize("rule", ["exact", "rejection", "block"])
def test_many_rounds_through_the_hash(rule: str, drafter: str) -> None:
    rng = torch.Generator().manual_seed(5)
    p, q = (torch.randn(4, 4, generator=rng, dtype=torch.float64).softmax(-1) for _ in range(2))
    texts, rate = play(rule, drafter, p, q, noise.TOKENS if rule == "exact" else noise.DRAFTS)
    assert 0.05 < rate < 0.95
    assert abs(distance_of(texts, p)) < 3.9


def test_drafts_whose_noise_comes_back_are_not_lossless_under_block() -> None:
    """Which drafts stay depends on those behind them: these may not be drawn by the same noise again."""
    rng = torch.Generator().manual_seed(5)
    p, q = (torch.randn(4, 4, generator=rng, dtype=torch.float64).softmax(-1) for _ in range(2))
    texts, _ = play("block", "draws", p, q, noise.TOKENS)
    assert distance_of(texts, p) > 5


@pytest.mark.parametrize(("rule", "sound"), [("rejection", True), ("block", False)])
def test_coins_that_come_back_are_not_lossless_under_block(
    monkeypatch: pytest.MonkeyPatch, rule: str, sound: bool
) -> None:
    """A coin by position alone: one that refused a place is known to be high when the place is looked at again. Only
    ``block`` looks at places behind the first one that it refuses."""
    flip = coins_module.coins

    def by_position(seed: torch.Tensor, stream: int, positions: torch.Tensor, start: torch.Tensor) -> torch.Tensor:
        return flip(seed, stream, positions, torch.zeros_like(start))

    monkeypatch.setattr(coins_module, "coins", by_position)
    rng = torch.Generator().manual_seed(5)
    p, q = (torch.randn(4, 4, generator=rng, dtype=torch.float64).softmax(-1) for _ in range(2))
    texts, _ = play(rule, "draws", p, q, noise.DRAFTS)
    assert abs(distance_of(texts, p)) < 3.9 if sound else distance_of(texts, p) > 5


def distance_of(texts: torch.Tensor, p: torch.Tensor) -> float:
    cells = list(itertools.product(range(4), repeat=LONG))
    index = (texts * torch.tensor([64, 16, 4, 1])).sum(-1)
    counts = torch.bincount(index, minlength=len(cells))
    expected = torch.tensor(
        [math.prod(float(p[a, b]) for a, b in itertools.pairwise((0, *cell))) for cell in cells], dtype=torch.float64
    )
    return chi_square(counts, TEXTS * expected)


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

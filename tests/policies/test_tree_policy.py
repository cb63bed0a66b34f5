"""``cost`` between chains and trees, played with known chances."""

from __future__ import annotations

import random

import pytest

from speccompile.policies import Cost, Ema, Gate
from speccompile.policies.acceptance import AcceptanceEstimator
from speccompile.policies.base import Done, Ladder, Row, TreeTier, Upcoming, start
from speccompile.policies.costs import CostTable, TierCost
from speccompile.policies.tree_gain import LEAST, MOST, TreeGain
from support.chances import survival

CHAINS = (0, 3, 7)
#: A tier's name is any int that is not a draft length.
TREE, LINE = 1008, 1009
TREES = {TREE: TreeTier(depth=3, branches=3), LINE: TreeTier(depth=3, branches=1)}
COSTS = {0: 20.0, 3: 24.0, 7: 29.0, TREE: 25.0, LINE: 26.0}
STEPS = 1500


def ladder(**costs: float) -> Ladder:
    own = COSTS | {{"tree": TREE, "plain": 0}[name]: ms for name, ms in costs.items()}
    return Ladder(CHAINS, CostTable({(1, tier): TierCost(ms) for tier, ms in own.items()}), TREES)


def play(chances: dict[int, float], on: Ladder, steps: int = STEPS, seed: int = 0) -> tuple[float, dict[int, int]]:
    """Tokens in a millisecond and how often each tier ran. ``chances``: of a draft, by tier; a chain's by default."""
    chooser, rng = start(Cost(), on), random.Random(seed)
    ran = dict.fromkeys(COSTS, 0)
    tokens = milliseconds = 0.0
    assert on.costs is not None
    for step in range(steps):
        row = Row(request=step // 100, context=50, draft_len=7)
        tier = chooser.choose(Upcoming((row,)))
        done = ran_once(rng, row.request, tier, chances[0], chances.get(tier, chances[0]), on)
        (accepted,), ms = done.accepted, done.milliseconds
        assert ms is not None
        chooser.note(done)
        ran[tier] += 1
        tokens, milliseconds = tokens + accepted + 1, milliseconds + ms
    return tokens / milliseconds, ran


def ran_once(rng: random.Random, request: int, tier: int, chance: float, share: float, on: Ladder) -> Done:
    """A step in which each draft of a chain is right with a ``chance``, and some node of a depth with ``share``."""
    assert on.costs is not None
    most = TREES[tier].depth if tier in TREES else tier
    luck = [rng.random() for _ in range(most)]
    accepted = next((j for j, drawn in enumerate(luck) if drawn >= share), most)
    along = next((j for j, drawn in enumerate(luck) if drawn >= chance), most)
    chain = (along, min(along + 1, most))
    results = (tier,), (accepted,), (accepted + 1,)
    return Done(tier, (request,), (50,), *results, milliseconds=on.costs.ms(1, tier), chain=(chain,))


def rate(tier: int, chances: dict[int, float], on: Ladder) -> float:
    most = TREES[tier].depth if tier in TREES else tier
    chance = chances.get(tier, chances[0])
    assert on.costs is not None
    return sum(chance**j for j in range(most + 1)) / on.costs.ms(1, tier)


@pytest.mark.parametrize(
    ("chances", "costs", "best"),
    [
        ({0: 0.45, TREE: 0.65}, {}, TREE),
        ({0: 0.45, TREE: 0.46}, {"tree": 27.0}, 3),
        ({0: 0.05, TREE: 0.08}, {}, 0),
        ({0: 0.92, TREE: 0.95}, {}, 7),
        ({0: 0.3, TREE: 0.7}, {"tree": 30.0}, TREE),
    ],
    ids=["tree", "chain", "none", "long", "costly_tree"],
)
def test_the_best_of_chains_and_trees_runs(chances: dict[int, float], costs: dict[str, float], best: int) -> None:
    on = ladder(**costs)
    rates = {tier: rate(tier, chances, on) for tier in COSTS}
    assert max(rates, key=rates.__getitem__) == best
    got, ran = play(chances, on)
    assert got > 0.95 * rates[best], f"{got / rates[best]:.3f}, {ran}"
    assert ran[best] > 0.7 * STEPS


@pytest.mark.parametrize(("first", "then", "best"), [(0.1, 0.6, TREE), (0.6, 0.03, 0)], ids=["better", "worse"])
def test_it_follows_a_change(first: float, then: float, best: int) -> None:
    chooser, rng, on = start(Cost(), ladder()), random.Random(1), ladder()
    assert on.costs is not None
    ran: list[int] = []
    for step in range(2 * STEPS):
        chance = first if step < STEPS else then
        row = Row(request=step // 100, context=50, draft_len=7)
        tier = chooser.choose(Upcoming((row,)))
        share = 1 - (1 - chance) ** (2.0 if tier == TREE else 1.0)
        chooser.note(ran_once(rng, row.request, tier, chance, share, on))
        ran.append(tier)
    assert ran[STEPS + 300 :].count(best) > 0.7 * (STEPS - 300)


def test_the_gain_of_a_tree_is_learnt_beside_known_chances() -> None:
    for truth in (1.0, 3.0):
        gain, rng = TreeGain(depth=1, branches=3), random.Random(2)
        for _ in range(4000):
            share = rng.choice((0.3, 0.5))
            gain.note(0, share, rng.random() < 1 - (1 - share) ** truth)
        assert gain.share(0, 0.5) == pytest.approx(1 - 0.5**truth, abs=0.09)


def test_a_tree_that_does_not_branch_gains_nothing() -> None:
    line = TreeGain(depth=2, branches=1)
    for hit in (True, True, False, True):
        line.note(0, 0.5, hit)
    assert line.share(0, 0.5) == 0.5


def test_what_becomes_of_the_chain_in_a_tree_is_seen_of_the_chain() -> None:
    acceptance = AcceptanceEstimator(3, {TREE: TreeTier(depth=3, branches=3)})
    for _ in range(100):
        # Another branch was right twice, the chain's second draft never; its third was not in the tree.
        acceptance.note(Done(TREE, (1,), (50,), (1008,), (2,), (3,), chain=((1, 2),)))
    (chances,) = survival(acceptance, [Row(1, 50, 3)])
    assert chances[0] > 0.95 and chances[1] < 0.05
    assert acceptance.emitted([Row(1, 50, 3)], [TREE])[TREE][0] > 2.0


def test_a_tree_that_was_cut_tells_of_no_miss_where_nothing_was() -> None:
    acceptance = AcceptanceEstimator(3, {TREE: TreeTier(depth=3, branches=3)})
    for request in range(200):
        # Two siblings of a tree of 1008 nodes, and one of them is right.
        acceptance.note(Done(TREE, (request,), (50,), (2,), (1,), (2,), chain=((1, 1),)))
    (chances,) = survival(acceptance, [Row(999, 50, 3)])
    assert chances[0] > 0.8 and chances[1] > 0.5 * chances[0]


def test_scores_that_rise_are_no_chances_above_one() -> None:
    acceptance = AcceptanceEstimator(3, {TREE: TreeTier(depth=3, branches=3)})
    row = Row(1, 50, 3, scores=(0.9, 0.95, 0.97))
    acceptance.note(Done(TREE, (1,), (50,), (1008,), (3,), (4,), (row.scores,), chain=((3, 3),)))
    acceptance.note(Done(3, (1,), (50,), (3,), (1,), (2,), ((0.5, float("nan"), 0.2),)))
    assert 1.0 < acceptance.emitted([row], [TREE])[TREE][0] < 5.0


def test_gains_stay_within_bounds() -> None:
    low, high = TreeGain(depth=1, branches=2), TreeGain(depth=1, branches=2)
    for _ in range(5000):
        low.note(0, 0.9, False)
        high.note(0, 0.01, True)
    assert low.share(0, 0.5) >= 1 - 0.5**LEAST - 1e-9 and high.share(0, 0.5) <= 1 - 0.5**MOST + 1e-9


def test_ladders_without_trees_choose_as_before() -> None:
    plain = Ladder(CHAINS, CostTable({(1, k): TierCost(COSTS[k]) for k in CHAINS}))
    _, ran = play({0: 0.5}, plain, steps=300)
    assert ran[TREE] == ran[LINE] == 0 and ran[3] > 200


@pytest.mark.parametrize(
    "policy", [Ema(alpha=1.0, warmup=0, interval=2), Gate(threshold=0.3, window=2, pause=2)], ids=["ema", "gate"]
)
def test_policies_of_draft_lengths_run_the_largest_tree_where_no_tier_is_a_chain(policy: Ema | Gate) -> None:
    def chosen(ladder: Ladder, accepted: int) -> list[int]:
        chooser, row, found = start(policy, ladder), Row(request=1, context=50, draft_len=8), []
        for _ in range(6):
            found.append(chooser.choose(Upcoming((row,))))
            drafts = 8 if found[-1] else 0
            right = accepted if drafts else 0
            chooser.note(Done(found[-1], (1,), (50,), (drafts,), (right,), (right + 1,)))
        return found

    small = TREE - 1
    alone = Ladder((0,), trees={small: TreeTier(2, 2), TREE: TREES[TREE]})
    # One of three is right at each depth: a third of what is judged, and an eighth of the nodes.
    assert chosen(alone, 1) == [TREE] * 6
    assert chosen(alone, 0) == [TREE, TREE, 0, 0, TREE, TREE]
    assert TREE not in chosen(ladder(), 3), "there are draft lengths to choose from"

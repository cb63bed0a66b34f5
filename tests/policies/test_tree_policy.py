"""``cost`` between chains and trees, played with known chances."""

from __future__ import annotations

import random

import pytest

from speccompile.policies import Cost
from speccompile.policies.acceptance import Acceptance
from speccompile.policies.base import Done, Ladder, Row, TreeShape, Upcoming, start
from speccompile.policies.costs import CostTable, TierCost
from speccompile.policies.tree_gain import LEAST, MOST, TreeGain

CHAINS = (0, 3, 7)
#: A tier's name is any int that is no draft length.
TREE, LINE = 1008, 1009
TREES = {TREE: TreeShape(depth=3, branches=3), LINE: TreeShape(depth=3, branches=1)}
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
        shape = TREES.get(tier)
        most = tier if shape is None else shape.depth
        accepted = 0
        while accepted < most and rng.random() < chances.get(tier, chances[0]):
            accepted += 1
        ms = on.costs.ms(1, tier)
        chooser.note(Done(tier, (row.request,), (50,), (tier,), (accepted,), (accepted + 1,), (), ms))
        ran[tier] += 1
        tokens, milliseconds = tokens + accepted + 1, milliseconds + ms
    return tokens / milliseconds, ran


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
        most = TREES[tier].depth if tier in TREES else tier
        accepted = next((j for j in range(most) if rng.random() >= share), most)
        chooser.note(Done(tier, (row.request,), (50,), (tier,), (accepted,), (accepted + 1,), (), on.costs.ms(1, tier)))
        ran.append(tier)
    assert ran[STEPS + 300 :].count(best) > 0.7 * (STEPS - 300)


def test_the_gain_of_a_tree_is_learnt_beside_known_chances() -> None:
    for truth in (1.0, 3.0):
        gain, rng = TreeGain(depth=1, branches=3), random.Random(2)
        for _ in range(4000):
            share = rng.choice((0.3, 0.5))
            gain.note(0, share, rng.random() < 1 - (1 - share) ** truth)
        assert gain.share(0, 0.5) == pytest.approx(1 - 0.5**truth, abs=0.09)


def test_what_is_seen_of_a_tree_tells_about_a_chain() -> None:
    gain = TreeGain(depth=2, branches=3)
    assert gain.note(0, 0.5, False) == 0.0
    told = TreeGain(depth=2, branches=3).note(0, 0.5, True)
    assert told == pytest.approx(0.5 / TreeGain(depth=2, branches=3).share(0, 0.5))
    line = TreeGain(depth=2, branches=1)
    assert [line.note(0, 0.5, hit) for hit in (True, False)] == [1.0, 0.0] and line.share(0, 0.5) == 0.5


def test_a_tree_that_was_cut_tells_of_no_miss_where_nothing_was() -> None:
    acceptance = Acceptance(3, {TREE: TreeShape(depth=3, branches=3)})
    for request in range(200):
        # Two siblings of a tree of 1008 nodes, and one of them is right.
        acceptance.note(Done(TREE, (request,), (50,), (2,), (1,), (2,)))
    (survival,) = acceptance.survival([Row(999, 50, 3)])
    assert survival[0] > 0.8 and survival[1] > 0.5 * survival[0]


def test_scores_that_rise_are_no_chances_above_one() -> None:
    acceptance = Acceptance(3, {TREE: TreeShape(depth=3, branches=3)})
    row = Row(1, 50, 3, scores=(0.9, 0.95, 0.97))
    acceptance.note(Done(TREE, (1,), (50,), (1008,), (3,), (4,), (row.scores,)))
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

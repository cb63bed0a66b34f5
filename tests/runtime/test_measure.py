"""How tiers are timed: which of them run, how often, and what is said of those that did not."""

from __future__ import annotations

import pytest
from transformers import LlamaForCausalLM

from speccompile.lowering.tier import Tier
from speccompile.runtime.measure import ENOUGH, LONG, MOST_REPEATS, QUICK, REPEATS, measure_tiers
from support.clocks import SimulatedClock
from support.engines import Bench, Make

TIERS = (0, 1, 3)


@pytest.fixture(scope="module")
def bench(model: LlamaForCausalLM) -> Bench:
    return Bench(model, "ngram", tiers=TIERS, max_batch=4)


def milliseconds(tier: Tier) -> float:
    """Linear in rows, draft length and context, so that what lies between two measurements is known."""
    context = int(tier.arena["length"][tier.arena.layout.dummy_slot])
    rows = tier.key.rows
    return 5.0 * rows + 2.0 * rows * tier.draft_len + 0.01 * (1 + tier.draft_len) * context


def test_costs_are_those_of_the_runs_and_what_was_not_run_lies_on_a_line(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make().engine
    SimulatedClock(lambda tier: milliseconds(tier) / 1e3, monkeypatch)
    costs = measure_tiers(engine.arena, engine.tiers)
    assert set(costs.entries) == {(rows, k) for rows in engine.table.row_counts for k in TIERS}
    assert not costs.undrafted
    for (rows, k), cost in costs.entries.items():
        # The shorter of the two contexts has one token.
        assert cost.fixed == pytest.approx(5.0 * rows + 2.0 * rows * k + 0.01 * (1 + k))
        assert cost.per_token == pytest.approx(0.01 * (1 + k))


def test_steps_without_their_drafter_lie_on_a_line_from_the_one_step_without_drafts(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make().engine
    SimulatedClock(lambda tier: milliseconds(tier) / 1e3, monkeypatch)
    costs = measure_tiers(engine.arena, engine.tiers, undrafted=True)
    assert costs.undrafted.keys() == costs.entries.keys()
    for key, cost in costs.undrafted.items():
        assert cost.fixed == pytest.approx(costs.entries[key].fixed)
        assert cost.per_token == pytest.approx(costs.entries[key].per_token)


@pytest.mark.parametrize(("seconds", "repeats"), [(0.0001, MOST_REPEATS), (QUICK / 4, REPEATS)])
def test_each_tier_is_run_a_few_times(
    make: Make, monkeypatch: pytest.MonkeyPatch, runs: list[str], seconds: float, repeats: int
) -> None:
    engine = make().engine
    SimulatedClock(lambda tier: seconds, monkeypatch)
    measure_tiers(engine.arena, engine.tiers)
    # The fewest and the most rows; at the longer context with the ends of the ladder.
    assert len(runs) == 2 * (repeats + 1) * (len(TIERS) + 2)


def test_steps_that_take_long_are_run_once(make: Make, monkeypatch: pytest.MonkeyPatch, runs: list[str]) -> None:
    engine = make().engine
    SimulatedClock(lambda tier: ENOUGH, monkeypatch)
    costs = measure_tiers(engine.arena, engine.tiers)
    assert len(runs) == 2 * len(TIERS)
    assert all(cost.fixed == 1e3 * ENOUGH and cost.per_token == 0 for cost in costs.entries.values())


def test_the_first_run_is_left_out_and_the_shortest_counts(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make().engine
    seen: dict[str, int] = {}

    def seconds(tier: Tier) -> float:
        seen[tier.name] = seen.get(tier.name, 0) + 1
        return {1: 0.0001, 2: 0.003, 3: 0.002}.get(seen[tier.name], 0.002)

    SimulatedClock(seconds, monkeypatch)
    costs = measure_tiers(engine.arena, engine.tiers)
    assert REPEATS == 2 and all(cost.fixed == pytest.approx(2.0) for cost in costs.entries.values())


def test_the_longer_context_is_half_a_slot(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, contexts = make().engine, set[int]()

    def seconds(tier: Tier) -> float:
        contexts.add(int(tier.arena["length"][tier.arena.layout.dummy_slot]))
        return 0.001

    SimulatedClock(seconds, monkeypatch)
    measure_tiers(engine.arena, engine.tiers)
    assert contexts == {1, engine.arena.layout.max_len // 2} and max(contexts) < LONG

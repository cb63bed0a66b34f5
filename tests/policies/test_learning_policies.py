"""Policies that learn: their options, their text, and what they choose after what they received."""

from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from speccompile.errors import InvalidPolicy, UnknownTier
from speccompile.policies import (
    Cost,
    CostTable,
    Done,
    Ema,
    Fixed,
    Gate,
    Ladder,
    Row,
    RunningCosts,
    TierCost,
    Upcoming,
    parse_policy,
    start,
)
from speccompile.policies.acceptance import AcceptanceEstimator
from speccompile.policies.base import AnyPolicy, Chooser
from support.chances import survival
from support.errors import raises

TIERS = (0, 1, 3, 7)


def table(draft: float, rows: tuple[int, ...] = (1, 2, 4, 8)) -> CostTable:
    return CostTable({(count, k): TierCost(10.0 + draft * k) for count in rows for k in TIERS})


def ladder(draft: float = 1.0) -> Ladder:
    return Ladder(TIERS, table(draft))


def upcoming(rows: int = 1, draft_len: int = 7, **more: Any) -> Upcoming:
    return Upcoming(tuple(Row(request, 50, draft_len, **more) for request in range(rows)))


def done(draft_len: int, right: int, rows: int = 1, ms: float | None = None) -> Done:
    """A step in which ``right`` drafts of each row would have been right."""
    accepted = min(draft_len, right)
    return Done(draft_len, tuple(range(rows)), (50,) * rows, (draft_len,) * rows, (accepted,) * rows,
                (accepted + 1,) * rows, (), ms)  # fmt: skip


def play(chooser: Chooser, steps: int, right: int, rows: int = 1) -> list[int]:
    chosen = []
    for _ in range(steps):
        chosen.append(chooser.choose(upcoming(rows)))
        chooser.note(done(chosen[-1], right, rows))
    return chosen


# --- text ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "policy"),
    [
        ("cost", Cost()),
        ("cost:hysteresis_ms=0.5,probing=0", Cost(0.5, 0)),
        ("cost:candidates=0/3", Cost(candidates=(0, 3))),
        ("ema", Ema()),
        ("ema:alpha=0.5, warmup=0", Ema(0.5, 0)),
        ("ema:candidates=1:1/3/7;8:0/", Ema(candidates={1: (1, 3, 7), 8: (0,)})),
        ("gate:threshold=0.5,draft_len=3", Gate(0.5, draft_len=3)),
    ],
)
def test_text_and_policy(text: str, policy: AnyPolicy) -> None:
    assert parse_policy(text, TIERS) == policy
    assert parse_policy(str(policy), TIERS) == policy


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("cost:speed=3", "'speed=3' must be one of its options"),
        ("cost:probing", "'probing' must be one of its options"),
        ("cost:probing=0.1,probing=0.2", "of its options, once"),
        ("cost:probing=fast", "'fast' is not a number"),
        ("cost:probing=2", "at most 1"),
        ("cost:hysteresis_ms=-1", "at least 0"),
        ("ema:alpha=0", "above 0"),
        ("ema:warmup=-1", "at least 0"),
        ("ema:candidates=3/1", "must ascend"),
        ("ema:candidates=1/1/3", "must ascend"),
        ("ema:candidates=3", "it must be a list of draft lengths"),
        ("ema:candidates=2:0/1", "no entry for one row"),
        ("gate:window=0", "at least 1"),
        ("gate:draft_len=0", "at least 1"),
    ],
)
def test_text_that_cannot_be_read(text: str, reason: str) -> None:
    with raises(InvalidPolicy, reason=re.compile(reason)):
        parse_policy(text, TIERS)


@pytest.mark.parametrize("candidates", [(), [], (3, 1), (1, 1), (-1,), ("3",), 3, {}, {1: ()}, {0: (1,), 1: (1,)}])
def test_candidates_that_are_none(candidates: Any) -> None:
    for policy in (Ema, Cost):
        with pytest.raises(InvalidPolicy):
            policy(candidates=candidates)


@pytest.mark.parametrize(
    "policy", ["ema:candidates=1/2", "cost:candidates=0/5", "gate:draft_len=2", Fixed(2), Ema(candidates={1: (0, 9)})]
)
def test_a_tier_that_was_not_built(policy: Any) -> None:
    with raises(UnknownTier, built=re.compile("0, 1, 3, 7")):
        parse_policy(policy, TIERS)


# --- gate --------------------------------------------------------------------------------


def test_a_gate_closes_and_opens_again() -> None:
    chooser = start(Gate(threshold=0.3, window=5, pause=10, draft_len=3), ladder())
    assert play(chooser, 5, 0) == [3] * 5
    assert play(chooser, 10, 3) == [0] * 10
    assert play(chooser, 20, 3) == [3] * 20


def judged(accepted: tuple[int, ...], proposed: tuple[int, ...]) -> Done:
    """A step of rows that had so many drafts, of which so many were accepted."""
    rows = len(proposed)
    return Done(8, tuple(range(rows)), (50,) * rows, proposed, accepted, tuple(a + 1 for a in accepted))


def test_a_gate_averages_the_rates_of_steps() -> None:
    """1 of 1 and 2 of 8: the mean of the rates is 0.625, though 3 of 9 drafts were accepted.

    Rows of a step are summed.
    """
    chooser = start(Gate(threshold=0.5, window=2), ladder())
    chooser.note(judged((1,), (1,)))
    chooser.note(judged((2,), (8,)))
    assert chooser.choose(upcoming()) == 7
    chooser = start(Gate(threshold=0.5, window=2), ladder())
    chooser.note(judged((1, 2), (1, 8)))
    chooser.note(judged((1, 2), (1, 8)))
    assert chooser.choose(upcoming()) == 0


@pytest.mark.parametrize(
    ("threshold", "rates", "closes"),
    [
        (0.5, [0.8, 0.8, 0.8], False),
        (0.3, [0.1, 0.2], False),
        (0.3, [0.1, 0.2, 0.3], True),
        (0.7, [0.9, 0.9, 0.9], False),
        (0.7, [0.9, 0.9, 0.9, 0.2], True),
    ],
    ids=str,
)
def test_a_gate_closes_where_tensorrt_llms_does(threshold: float, rates: list[float], closes: bool) -> None:
    """The cases of its ``test_spec_gate.py``, with a window of three."""
    chooser = start(Gate(threshold=threshold, window=3), ladder())
    for rate in rates:
        chooser.note(judged((round(10 * rate),), (10,)))
    assert (chooser.choose(upcoming()) == 0) == closes


# --- cost ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("right", "draft", "wanted"), [(7, 1.0, 7), (3, 1.0, 3), (1, 2.0, 1), (0, 1.0, 0), (7, 20.0, 0)]
)
def test_cost_settles_on_the_tier_that_emits_most_in_a_millisecond(right: int, draft: float, wanted: int) -> None:
    chosen = play(start(Cost(), ladder(draft)), 300, right)
    assert chosen[100:].count(wanted) >= 0.8 * 200
    assert set(chosen[250:]) <= {wanted, *[k for k in TIERS if k > wanted][:1]}, "probes go one tier up"


def test_cost_loses_no_more_to_probes_than_it_may() -> None:
    for draft in (0.5, 1.0, 3.0):
        chosen = play(start(Cost(probing=0.01), ladder(draft)), 2000, 0)[100:]
        lost = sum(draft * k for k in chosen)
        assert 0 < lost <= 1.3 * 0.01 * 10.0 * len(chosen)


def test_cost_without_probing_never_looks_again() -> None:
    assert set(play(start(Cost(probing=0.0), ladder()), 500, 0)[100:]) == {0}


def test_cost_comes_back_from_no_drafts() -> None:
    chooser = start(Cost(), ladder())
    assert play(chooser, 300, 0)[-1] in (0, 1)
    assert play(chooser, 60, 7)[-1] == 7


def test_hysteresis_holds_a_tier_against_small_gains() -> None:
    """One draft is always right: K=1 saves 8 ms of two steps of 10, and less than the hysteresis."""
    assert play(start(Cost(hysteresis_ms=50.0), ladder(2.0)), 100, 1)[-1] == 7
    assert play(start(Cost(hysteresis_ms=1.0), ladder(2.0)), 100, 1)[-1] == 1


def test_what_a_drafter_has_decides() -> None:
    chooser = start(Cost(probing=0), ladder(0.1))
    play(chooser, 50, 7)
    assert chooser.choose(upcoming(draft_len=7)) == 7
    assert chooser.choose(upcoming(draft_len=0)) == 0, "of equals the smallest"


def test_scores_are_believed_as_far_as_they_came_true() -> None:
    acceptance = AcceptanceEstimator(2)
    scored = Done(2, (0,), (50,), (2,), (0,), (1,), ((0.95, 0.95 * 0.35),))
    for _ in range(40):
        acceptance.note(scored)
    (chances,) = survival(acceptance, [Row(9, 50, 2, (0.95, 0.9))])
    assert chances[0] < 0.1
    (chances,) = survival(acceptance, [Row(9, 50, 2, (0.35, 0.3))])
    assert 0.3 < chances[0] < 0.4, "nothing was seen of such a score"


def test_drafts_behind_a_wrong_one_say_nothing() -> None:
    acceptance = AcceptanceEstimator(3)
    for _ in range(50):
        acceptance.note(Done(3, (0,), (50,), (3,), (1,), (2,)))
    (chances,) = survival(acceptance, [Row(0, 50, 3)])
    assert chances[0] > 0.9 and chances[1] < 0.1
    assert acceptance._all.rates[2].trials == 0


def test_requests_have_estimates_of_their_own() -> None:
    acceptance = AcceptanceEstimator(1)
    for _ in range(60):
        acceptance.note(Done(1, (0, 1), (50, 50), (1, 1), (1, 0), (2, 1)))
    good, bad, new = (chances[0] for chances in survival(acceptance, [Row(n, 50, 1) for n in (0, 1, 2)]))
    assert good > 0.85 and bad < 0.15 and 0.3 < new < 0.7


@given(st.lists(st.tuples(st.sampled_from(TIERS), st.integers(0, 7), st.floats(0.1, 1e4)), max_size=60))
def test_the_same_is_chosen_after_the_same(steps: list[tuple[int, int, float]]) -> None:
    def chosen() -> list[int]:
        choosers = [start(policy, ladder()) for policy in (Cost(), Ema(), Gate())]
        seen = []
        for draft_len, right, ms in steps:
            seen += [chooser.choose(upcoming()) for chooser in choosers]
            for chooser in choosers:
                chooser.note(done(draft_len, right, ms=ms))
        return seen

    assert chosen() == chosen()
    assert set(chosen()) <= set(TIERS)


# --- costs ---------------------------------------------------------------------------------------


def test_what_slows_all_tiers_speaks_against_none() -> None:
    costs = RunningCosts(table(1.0))
    before = costs.ms(1, 7, 0) / costs.ms(1, 0, 0)
    for _ in range(100):
        costs.note(1, 7, 0, 34.0)
    assert costs.ms(1, 7, 0) == pytest.approx(34.0, rel=0.01)
    assert costs.ms(1, 7, 0) / costs.ms(1, 0, 0) < before * 1.15


def test_a_tier_that_takes_longer_than_it_did_is_found_out() -> None:
    costs = RunningCosts(table(1.0))
    for _ in range(400):
        costs.note(1, 7, 0, 34.0)
        costs.note(1, 0, 0, 10.0)
    assert costs.ms(1, 7, 0) / costs.ms(1, 0, 0) == pytest.approx(3.4, rel=0.1)


def test_steps_without_drafts_are_one_step_whoever_has_no_drafts() -> None:
    """No drafter runs before K=0."""
    drafted = table(2.0)
    costs = RunningCosts(CostTable(drafted.entries, table(1.0).entries))
    for _ in range(50):
        costs.note(1, 0, 0, 20.0, drafted=False)
        costs.note(1, 7, 0, 17.0, drafted=False)
    assert costs.ms(1, 0, 0, drafted=True) == costs.ms(1, 0, 0, drafted=False)
    assert costs.ms(1, 7, 0, drafted=True) > costs.ms(1, 7, 0, drafted=False)


def test_one_long_step_counts_little() -> None:
    costs = RunningCosts(table(1.0))
    costs.note(1, 0, 0, 1e6)
    assert costs.ms(1, 0, 0) < 11.0


def test_costs_follow_rows_and_context() -> None:
    costs = CostTable({(rows, k): TierCost(float(rows + k), 0.01) for rows in (1, 2, 4) for k in (0, 1)})
    assert costs.ms(3, 1, 100) == pytest.approx(4 + 1 + 1.0)
    assert costs.ms(9, 0) == 4
    assert CostTable.from_json(costs.as_json()) == costs
    with pytest.raises(ValueError, match="a tier is missing"):
        CostTable.from_json({"entries": [[1, 0, 5.0, 0.0], [1, 1, 5.0, 0.0], [2, 0, 5.0, 0.0]], "undrafted": []})

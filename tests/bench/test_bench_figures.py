"""Figures of a comparison: what they are made of, their intervals, acceptance by position, calibration."""

from __future__ import annotations

import random

import pytest

from speccompile.bench.answers import Answer, Steps
from speccompile.bench.bootstrap import interval, quotient
from speccompile.bench.calibration import calibration_of
from speccompile.bench.figures import Answers, contexts_of, figures_of, positions_of, tiers_of
from speccompile.bench.results import Answered


def steps(*counts: tuple[int, int], ms: float = 10.0) -> Steps:
    """Steps of (drafts, accepted drafts)."""
    depths, accepted = zip(*counts, strict=True)
    emitted = tuple(count + 1 for count in accepted)
    return Steps(tuple(map(str, depths)), depths, accepted, emitted, (ms,) * len(counts), ((),) * len(counts))


def answered(prompt: str, own: Steps, *, seconds: float = 0.0, category: str = "qa", context: int = 10) -> Answered:
    tokens = tuple(range(1 + sum(own.emitted)))
    end = 0.5 + (seconds or len(own) * 0.012)
    return Answered("line", prompt, category, 0, 0, context, Answer(tokens, 0.5, end, "max_new_tokens", own))


def by_turn(*found: Answered) -> Answers:
    return {("machine", each.prompt, each.turn): each for each in found}


def test_the_speed_is_acceptance_over_step_cost() -> None:
    own = by_turn(answered("a", steps((3, 3), (3, 0), (3, 1))), answered("b", steps((3, 2), (3, 1)), seconds=0.03))
    plain = by_turn(
        answered("a", steps(*[(0, 0)] * 7), seconds=0.07), answered("b", steps(*[(0, 0)] * 5), seconds=0.05)
    )
    found = figures_of(own, plain)
    assert found.acceptance_length is not None and found.speed is not None and found.step_cost is not None
    assert found.acceptance_length.value == 12 / 5
    assert found.step_ms == pytest.approx(66 / 5)
    assert found.step_cost == pytest.approx(6.6 / 5)
    assert found.speed.value == pytest.approx(found.acceptance_length.value / found.step_cost)
    assert found.tokens_per_second == pytest.approx(12 / 0.066)
    assert (found.prompts, found.answers, found.tokens, found.steps) == (2, 2, 14, 5)
    assert found.first_token_ms == 500


def test_without_k0_and_without_steps_figures_are_missing() -> None:
    alone = figures_of(by_turn(answered("a", steps((3, 3)))), {})
    assert alone.speed is None and alone.step_cost is None and alone.acceptance_length is not None
    assert alone.acceptance_length.low is None, "one prompt has no interval"
    unknown = figures_of(by_turn(answered("a", Steps(), seconds=1.0)), by_turn(answered("a", steps((0, 0)))))
    assert unknown.acceptance_length is None and unknown.step_ms is None and unknown.step_cost is None


def test_an_interval_covers_the_true_value_as_often_as_it_states() -> None:
    rng, covered, trials = random.Random(0), 0, 120
    for trial in range(trials):
        sums = [[sum(rng.random() < 0.6 for _ in range(20)), 20] for _ in range(40)]
        found = interval(sums, quotient(0, 1), seed=trial)
        assert found.low is not None and found.high is not None
        covered += found.low <= 0.6 <= found.high
    assert 0.87 <= covered / trials <= 0.995


def test_an_interval_is_that_of_any_run() -> None:
    sums = [[1, 2], [3, 4], [5, 5]]
    assert interval(sums, quotient(0, 1)) == interval(sums, quotient(0, 1))


def test_acceptance_by_position_is_conditional() -> None:
    # The second draft of a step counts if there is one and the first was accepted.
    found = positions_of([steps((3, 0), (3, 1), (2, 2)), steps((1, 1), (0, 0))])
    assert [(each.position, each.reached, each.accepted) for each in found] == [(1, 4, 3), (2, 2, 1)]
    found = positions_of([steps((3, 3), (3, 2))])
    assert [(each.reached, each.accepted) for each in found] == [(2, 2), (2, 2), (2, 1)]


def test_steps_are_grouped_by_their_context() -> None:
    # The first step has 511 tokens before it, the next one 513.
    own = [answered("a", steps((1, 1), (1, 1), ms=20.0), context=510)]
    plain = [answered("a", steps((0, 0), ms=10.0), context=510)]
    below, above = contexts_of(own, plain)
    assert (below.low, below.high, below.steps, below.acceptance_length, below.speed) == (0, 512, 1, 2.0, 1.0)
    assert (above.low, above.high, above.steps, above.speed) == (512, 1024, 1, None)


def test_steps_are_grouped_by_their_tier() -> None:
    most, other = tiers_of([steps((3, 3), (3, 1)), steps((0, 0), (3, 1))])
    assert (most.tier, most.steps, most.acceptance_length, most.median_ms) == ("3", 3, 8 / 3, 10.0)
    assert (other.tier, other.steps, other.acceptance_length) == ("0", 1, 1.0)


def test_calibrated_scores_have_no_error() -> None:
    rng = random.Random(0)

    def requests(shift: float) -> list[Steps]:
        found = []
        for _ in range(8000):
            score = rng.choice((0.25, 0.65))
            right = int(rng.random() < score + shift)
            found.append(Steps(("1",), (1,), (right,), (1 + right,), (1.0,), ((score,),)))
        return found

    good, bad = calibration_of(requests(0.0)), calibration_of(requests(0.2))
    assert good is not None and bad is not None
    assert good.drafts == 8000 and good.error < 0.02
    assert bad.error == pytest.approx(0.2, abs=0.02)
    assert [(each.low, each.high) for each in good.bins] == [(0.2, 0.3), (0.6, 0.7)]
    assert bad.bins[0].accepted == pytest.approx(0.45, abs=0.02) and bad.brier > good.brier


def test_scores_of_drafts_that_were_not_judged_do_not_count() -> None:
    judged = Steps(("1",), (1,), (1,), (2,), (1.0,), ((0.9, 0.5, 0.1),))
    found = calibration_of([judged])
    assert found is not None and (found.drafts, found.bins[0].accepted) == (1, 1.0)
    assert calibration_of([steps((3, 2))]) is None

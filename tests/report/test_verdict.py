"""The sentences of a report say what its numbers say."""

from __future__ import annotations

from dataclasses import replace

from speccompile.report.data import TierReport
from speccompile.report.run_data import Decoded, Measured
from speccompile.report.verdict import explained, verdict
from support.reports import tiny_report


def tier(
    base: TierReport, ms: float, *, length: float | None = None, rate: float = 0.0, rates: tuple[float, ...] = ()
) -> TierReport:
    """``base`` with a step of ``ms``, and, with ``length``, decoded; ``rates`` of its drafts were accepted."""
    decoded = None
    if length is not None:
        steps = round(100 / length)
        decoded = Decoded(3, 100, steps, length, steps, length, {base.name: steps}, ms, rate, rates)
    return replace(base, measured=Measured(ms, ms, 5, 32, ""), decoded=decoded, cost=None)


def sentences(*tiers: TierReport) -> list[str]:
    return list(verdict(explained(tiers), (), None, None))


def test_it_says_what_a_tier_costs_and_has() -> None:
    plain, _, largest = tiny_report().tiers
    first, second = sentences(tier(plain, 10.0, length=1.0, rate=100), tier(largest, 12.7, length=2.06, rate=162))
    assert first == "Speculation pays: K=3 is 1.62 times as fast as K=0."
    assert second == (
        "K=3 costs 1.27 times K=0, breaks even at an acceptance length of 1.27, and has 2.06 (3 prompts): "
        "decoded 1.62 times as fast as K=0."
    )


def test_it_says_when_drafts_do_not_pay() -> None:
    plain, _, largest = tiny_report().tiers
    first, _ = sentences(tier(plain, 10.0, length=1.0, rate=100), tier(largest, 15.0, length=1.2, rate=80))
    assert first == "Speculation does not pay here: no tier is faster than K=0."


def test_it_compares_a_tier_with_the_one_before_it() -> None:
    plain, shorter, longer = tiny_report().tiers
    found = sentences(
        tier(plain, 10.0, length=1.0, rate=100),
        tier(shorter, 11.0, length=1.5, rate=136, rates=(0.5,)),
        tier(longer, 13.2, length=1.53, rate=116, rates=(0.5, 0.06, 0.0)),
    )
    assert found[0] == "Speculation pays: K=1 is 1.36 times as fast as K=0."
    assert found[-1] == (
        "K=3 against K=1: a step costs 1.20 times as much and emits 1.02 times as many tokens, so it is slower where "
        "both run. Of its drafts at positions 2 to 3, 6%, 0% were accepted."
    )


def test_noise_makes_no_tier_faster_than_the_one_before_it() -> None:
    plain, shorter, longer = tiny_report().tiers
    found = sentences(
        tier(plain, 10.0, length=1.0, rate=100),
        tier(shorter, 11.0, length=1.5, rate=136, rates=(0.5,)),
        tier(longer, 10.9, length=1.5, rate=137, rates=(0.5, 0.0, 0.0)),
    )
    assert "so it is about as fast where both run" in found[-1]


def test_a_clock_that_the_measured_steps_contradict_decides_nothing() -> None:
    plain, _, largest = tiny_report().tiers
    first, second, *_ = sentences(tier(plain, 10.0, length=1.0, rate=40), tier(largest, 12.5, length=1.1, rate=91))
    assert first == "It is not decided whether speculation pays: the clock and the measured steps disagree."
    assert "(K=3 2.27 and 0.88 times K=0)" in second


def test_no_tier_breaks_even_below_one_token() -> None:
    plain, _, largest = tiny_report().tiers
    *_, last = sentences(tier(plain, 10.0, length=1.0, rate=100), tier(largest, 9.0, length=1.0, rate=110))
    assert "K=3 costs 0.90 times K=0, breaks even at an acceptance length of 1.00" in last


def test_it_does_not_guess() -> None:
    plain, _, largest = tiny_report().tiers
    first, second = sentences(tier(plain, 10.0), tier(largest, 12.7))
    assert first == "No request was decoded yet, so it is not known whether speculation pays."
    assert second.endswith("breaks even at an acceptance length of 1.27; what it has is not known.")


def test_it_says_why_a_tier_is_slower() -> None:
    plain, _, largest = tiny_report().tiers
    # The regions of K=0 with 5 ms added to one of them: what `largest` itself measured differs from run to run.
    slower = tuple(replace(cost, ms=(cost.ms or 0.0) + 5.0 * (cost.region == "attention")) for cost in plain.regions)
    slow = replace(tier(largest, 20.0), regions=slower)
    text = " ".join(explained([tier(plain, 10.0), slow])[1].explanation)
    assert "needs 20.0 ms, 2.00 times that of K=0" in text
    assert "Against K=0 it adds attention +5.00 ms." in text

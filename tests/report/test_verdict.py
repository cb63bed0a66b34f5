"""The sentences of a report say what its numbers say."""

from __future__ import annotations

from dataclasses import replace

from speccompile.report.data import Decoded, Measured, TierReport
from speccompile.report.verdict import explained, verdict
from support.reports import tiny_report


def tier(base: TierReport, ms: float, *, length: float | None = None, rate: float = 0.0) -> TierReport:
    """``base`` with a step of ``ms``, and, with ``length``, decoded."""
    decoded = None
    if length is not None:
        decoded = Decoded(3, 100, 50, length, 50, length, {base.name: 50}, ms, rate, ())
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
    assert "takes 20.0 ms, 2.00 times that of K=0" in text
    assert "Against K=0 it adds attention +5.00 ms." in text

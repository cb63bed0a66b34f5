"""Sentences of a report: whether speculation pays, and an explanation of each tier's step time."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from speccompile.report.data import Fallback, TierReport
from speccompile.report.program_data import Region
from speccompile.report.run_data import AcceptanceCounts, RegionCost, TraceReport

#: Names of regions in sentences.
NAMES: Mapping[Region, str] = {
    "draft": "drafting",
    "inputs": "step inputs",
    "embedding": "embedding",
    "qkv": "qkv",
    "attention": "attention",
    "projection": "attention output",
    "mlp": "MLP",
    "elementwise": "elementwise kernels",
    "layers": "layers",
    "lm_head": "lm_head",
    "choose": "choosing tokens",
    "commit": "commit",
    "propose": "proposing",
    "other": "other",
    "host": "host",
}
#: Largest number of regions in a sentence, and smallest share of a step that a sentence names.
_NAMED, _WORTH = 3, 0.02
#: The clock and the measured steps of a tier agree if their ratio is below the first factor. Two tiers are equally fast
#: if their ratio is below the second.
_AGREE, _SAME = 1.25, 1.03


def milliseconds(value: float) -> str:
    """Format ``value`` with one digit after the point from 10 ms on, else with two."""
    return f"{value:.1f} ms" if value >= 9.95 else f"{value:.2f} ms"


def explained(tiers: Sequence[TierReport]) -> tuple[TierReport, ...]:
    """Add to each tier its cost relative to K=0, and sentences that explain it."""
    plain = next((tier for tier in tiers if tier.draft_len == 0), None)
    return tuple(_explained(tier, plain) for tier in tiers)


def _explained(tier: TierReport, plain: TierReport | None) -> TierReport:
    if plain is None or plain.measured is None or tier.measured is None:
        return replace(tier, explanation=("It was not measured.",))
    cost = tier.measured.step_ms / plain.measured.step_ms
    return replace(tier, cost=cost, explanation=tuple(_reasons(tier, plain, cost)))


def _reasons(tier: TierReport, plain: TierReport, cost: float) -> Iterator[str]:
    assert tier.measured is not None
    step = tier.measured.step_ms
    ratio = "" if tier is plain else f", {cost:.2f} times that of {plain.name}"
    yield f"A step of {tier.rows} x {tier.width} tokens needs {milliseconds(step)}{ratio}."
    if tier.floor_ms is not None and tier.floor_ms > _WORTH * step:
        yield (
            f"Memory needs {milliseconds(tier.floor_ms)} for the {tier.nbytes / 2**20:,.1f} MiB that it reads: "
            f"the step needs {step / tier.floor_ms:.2f} times that."
        )
    inside = [cost for cost in tier.regions if cost.ms and cost.region != "host"]
    costs = sorted(inside, key=lambda cost: -(cost.ms or 0.0))
    shares = [
        f"{NAMES[cost.region]} {milliseconds(cost.ms or 0)} ({(cost.ms or 0) / step:.0%})" for cost in costs[:_NAMED]
    ]
    if shares:
        yield f"Most of it is {', '.join(shares)}."
    if tier is not plain:
        added = _added(tier.regions, plain.regions)
        listed = [f"{NAMES[region]} +{milliseconds(ms)}" for region, ms in added if ms > _WORTH * step][:_NAMED]
        if listed:
            yield f"Against {plain.name} it adds {', '.join(listed)}."
    slow = [
        cost
        for cost in costs
        if (cost.floor_ms or 0.0) > _WORTH * step and cost.ms and cost.ms - (cost.floor_ms or 0.0) > 2 * _WORTH * step
    ]
    if slow:
        worst = max(slow, key=lambda cost: (cost.ms or 0.0) - (cost.floor_ms or 0.0))
        yield (
            f"Furthest above the time that memory needs is {NAMES[worst.region]}: {milliseconds(worst.ms or 0)}, "
            f"where memory needs {milliseconds(worst.floor_ms or 0)}."
        )


def _added(tier: Sequence[RegionCost], plain: Sequence[RegionCost]) -> list[tuple[Region, float]]:
    before = {cost.region: cost.ms or 0.0 for cost in plain}
    added = [(cost.region, (cost.ms or 0.0) - before.get(cost.region, 0.0)) for cost in tier if cost.region != "host"]
    return sorted(added, key=lambda item: -item[1])


#: An acceptance length, and the runs in which it was observed.
Seen = tuple[float, str]


def acceptance_of(tier: TierReport, acceptance: AcceptanceCounts | None, trace: TraceReport | None) -> Seen | None:
    """Acceptance length of a tier's steps, and the runs in which it was observed, or None."""
    if tier.decoded is not None and tier.decoded.own_length is not None:
        share = tier.decoded.own_steps / tier.decoded.steps
        where = f"{tier.decoded.prompts} prompt{'s' * (tier.decoded.prompts > 1)}"
        return tier.decoded.own_length, where if share == 1 else f"{where}; it ran {share:.0%} of the steps"
    if trace is not None:
        steps = [step for step in trace.steps if step.draft_len == tier.draft_len]
        if rows := sum(len(step.requests) for step in steps):
            return sum(sum(step.emitted) for step in steps) / rows, "the trace"
    if acceptance is not None and tier.tree is None:
        return acceptance.acceptance_length, "all requests so far, at all tiers"
    return None


def verdict(
    tiers: Sequence[TierReport],
    fallbacks: Sequence[Fallback],
    acceptance: AcceptanceCounts | None,
    trace: TraceReport | None,
) -> tuple[str, ...]:
    """Sentences about a wrap as a whole."""
    gains = {tier.name: gain for tier in tiers if (gain := _gain(tier, tiers, acceptance, trace)) is not None}
    drafting = [tier for tier in tiers if tier.draft_len and tier.cost is not None]
    found = [_of_tier(tier, gains.get(tier.name), acceptance, trace) for tier in drafting]
    pairs = [_of_pair(tier, shorter) for shorter, tier in itertools.pairwise(drafting)]
    return (_best(tiers, gains), *_doubts(tiers, gains), *found, *filter(None, pairs), *_of_fallbacks(fallbacks))


def _gain(
    tier: TierReport, tiers: Sequence[TierReport], acceptance: AcceptanceCounts | None, trace: TraceReport | None
) -> float | None:
    """Speed relative to K=0 in emitted tokens: as decoded, else from acceptance and cost."""
    plain = next((item for item in tiers if item.draft_len == 0), None)
    if tier is plain or plain is None:
        return None
    if tier.decoded is not None and plain.decoded is not None and plain.decoded.tokens_per_second:
        return tier.decoded.tokens_per_second / plain.decoded.tokens_per_second
    seen = acceptance_of(tier, acceptance, trace)
    return None if seen is None or tier.cost is None else seen[0] / tier.cost


def _of_tier(
    tier: TierReport, gain: float | None, acceptance: AcceptanceCounts | None, trace: TraceReport | None
) -> str:
    assert tier.cost is not None
    name = _beginning(tier)
    # Every step emits at least one token.
    even = max(tier.cost, 1.0)
    sentence = f"{name} costs {tier.cost:.2f} times K=0, breaks even at an acceptance length of {even:.2f}"
    if (seen := acceptance_of(tier, acceptance, trace)) is None:
        return f"{sentence}; what it has is not known."
    sentence = f"{sentence}, and has {seen[0]:.2f} ({seen[1]})"
    if gain is None:
        return f"{sentence}."
    # The decoded gain differs from length over cost: other tiers run too, and the host adds time.
    return f"{sentence}: {'decoded ' * (tier.decoded is not None)}{gain:.2f} times as fast as K=0."


def _of_pair(tier: TierReport, shorter: TierReport) -> str | None:
    """Compare the cost of a tier's additional drafts, and the tokens that they emit, with the next smaller tier."""
    more, less = tier.decoded, shorter.decoded
    if more is None or less is None or not more.own_length or not less.own_length or not (tier.cost and shorter.cost):
        return None
    cost, length = tier.cost / shorter.cost, more.own_length / less.own_length
    sentence = (
        f"{_beginning(tier)} against {shorter.name}: a step costs {cost:.2f} times as much and emits {length:.2f} "
        f"times as many tokens, so it is {_compared(length / cost)} where both run"
    )
    rates = more.per_position[len(less.per_position) :]
    if not rates:
        return f"{sentence}."
    first, last = len(less.per_position) + 1, len(more.per_position)
    positions = f"position {first}" if first == last else f"positions {first} to {last}"
    listed = ", ".join(f"{rate:.0%}" for rate in rates)
    return f"{sentence}. Of its drafts at {positions}, {listed} were accepted."


def _compared(ratio: float) -> str:
    if 1 / _SAME < ratio < _SAME:
        return "about as fast"
    return "faster" if ratio > 1.0 else "slower"


def _beginning(tier: TierReport) -> str:
    return tier.name[0].upper() + tier.name[1:]


def _best(tiers: Sequence[TierReport], gains: Mapping[str, float]) -> str:
    if not any(tier.draft_len for tier in tiers):
        return "There is no tier with drafts."
    if not gains:
        what = "No step was measured" if all(tier.cost is None for tier in tiers) else "No request was decoded yet"
        return f"{what}, so it is not known whether speculation pays."
    best = max(gains, key=lambda name: gains[name])
    by_steps = _gains_by_steps(tiers)
    if best in by_steps and (max(by_steps.values()) > 1.0) != (gains[best] > 1.0):
        return "It is not decided whether speculation pays: the clock and the measured steps disagree."
    if gains[best] <= 1.0:
        return "Speculation does not pay here: no tier is faster than K=0."
    return f"Speculation pays: {best} is {gains[best]:.2f} times as fast as K=0."


def _gains_by_steps(tiers: Sequence[TierReport]) -> dict[str, float]:
    """Speed of each tier relative to K=0 if each decoded step had taken its measured time."""
    times = {tier.name: tier.measured.step_ms for tier in tiers if tier.measured is not None}
    rates: dict[str, float] = {}
    for tier in tiers:
        decoded = tier.decoded
        if decoded is not None and decoded.tokens and times.keys() >= decoded.tier_steps.keys():
            rates[tier.name] = decoded.tokens / sum(times[name] * count for name, count in decoded.tier_steps.items())
    plain = next((rates[tier.name] for tier in tiers if tier.draft_len == 0 and tier.name in rates), None)
    if plain is None:
        return {}
    return {tier.name: rates[tier.name] / plain for tier in tiers if tier.draft_len and tier.name in rates}


def _doubts(tiers: Sequence[TierReport], gains: Mapping[str, float]) -> Iterator[str]:
    """Warn if the clock during decoding differs from the steps that were measured on their own."""
    by_steps = _gains_by_steps(tiers)
    differ = [name for name in gains if name in by_steps and not 1 / _AGREE < gains[name] / by_steps[name] < _AGREE]
    if differ:
        listed = ", ".join(f"{name} {gains[name]:.2f} and {by_steps[name]:.2f}" for name in differ)
        yield (
            f"By the clock and by the measured steps tiers are not equally fast ({listed} times K=0): the host's part "
            "of a step counts, or the machine did other work meanwhile. Then measure again with more prompts."
        )


def _of_fallbacks(fallbacks: Sequence[Fallback]) -> Iterator[str]:
    if fallbacks:
        yield f"{len(fallbacks)} fallback{'s' * (len(fallbacks) > 1)}: {'; '.join(item.what for item in fallbacks)}."

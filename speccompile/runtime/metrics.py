"""Statistics of speculation in Prometheus' format."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

from speccompile.errors import InvalidOption
from speccompile.runtime.stats import SECONDS, SHARES, Histogram, Stats

#: Counters of :class:`Stats`, by the name that Prometheus shows (after ``speccompile_``).
TOTALS = {
    "steps": "Runs of a tier.",
    "no_proposal_steps": "Steps in which no row had a draft to judge.",
    "row_steps": "Live rows of all steps.",
    "emitted_tokens": "Tokens that steps emitted.",
    "draft_tokens": "Draft tokens that the target judged.",
    "accepted_tokens": "Draft tokens that were accepted.",
    "rejected_tokens": "Draft tokens that the target processed but did not accept.",
    "prefill_passes": "Prompt chunks that were processed.",
    "prompt_tokens": "Tokens of the prompts that have received a slot.",
    "prefill_tokens": "Prompt tokens that were processed.",
    "reused_tokens": "Prompt tokens whose KV was reused.",
    "reread_tokens": "Tokens that were processed again: without a recurrent state at their end, or after a preemption.",
    "preemptions": "Requests that gave their pages of KV to another one, to be read again later.",
    "ended_requests": "Requests that have ended.",
}


def prometheus_text(stats: Stats, *, running: int, waiting: int) -> str:
    """Return all metrics in Prometheus' text format. Counters and histograms start again with ``stats.reset()``, as
    after a restart.

    Args:
        running: number of requests that have a slot.
        waiting: number of requests that have no slot yet.

    Raises:
        InvalidOption: prometheus_client is not installed.
    """
    try:
        from prometheus_client import CollectorRegistry, core, generate_latest
    except ImportError as error:
        reason = "it needs the library prometheus_client: pip install 'speccompile[metrics]'"
        raise InvalidOption(where="spec", name="prometheus", value="text", reason=reason) from error

    class EngineCollector:
        def collect(self) -> Iterator[Any]:
            yield from _families(core.CounterMetricFamily, stats)
            yield from _gauges(core.GaugeMetricFamily, running, waiting)
            yield _of_requests(core.HistogramMetricFamily, stats)
            yield from _latencies(core.HistogramMetricFamily, stats)

    registry = CollectorRegistry()
    registry.register(EngineCollector())  # type: ignore[arg-type, unused-ignore]
    return str(generate_latest(registry).decode())


def _families(family: Any, stats: Stats) -> Iterator[Any]:
    for name, what in TOTALS.items():
        yield family(f"speccompile_{name}", what, value=getattr(stats, name))
    by_tier: dict[str, tuple[str, dict[int, Any]]] = {
        "tier_steps": ("Steps by draft length.", stats.tier_steps),
        "tier_seconds": ("Seconds of steps by draft length.", stats.tier_seconds),
    }
    for name, (what, values) in by_tier.items():
        yield _labelled(family(f"speccompile_{name}", what, labels=["draft_len"]), values)
    by_position = {
        "proposed_at": ("Drafts that were judged, by position.", stats.proposed_at),
        "accepted_at": ("Drafts that were accepted, by position.", stats.accepted_at),
    }
    for name, (what, counts) in by_position.items():
        metric = family(f"speccompile_{name}", what, labels=["position"])
        yield _labelled(metric, dict(enumerate(counts, 1)))


def _of_requests(family: Any, stats: Stats) -> Any:
    what = "Share of a request's drafts at a position that was accepted, over the requests that have ended."
    metric = family("speccompile_request_accepted_share", what, labels=["position"])
    for position, counts in enumerate(stats.request_shares):
        below = itertools.accumulate(counts)
        bounds = [str(bound) for bound in SHARES[:-1]] + ["+Inf"]
        buckets = [(bound, float(count)) for bound, count in zip(bounds, below, strict=True)]
        metric.add_metric([str(position + 1)], buckets, stats.request_share_sums[position])
    return metric


def _gauges(family: Any, running: int, waiting: int) -> Iterator[Any]:
    yield family("speccompile_running_requests", "Requests that have a slot.", value=running)
    yield family("speccompile_waiting_requests", "Requests that wait for a slot.", value=waiting)


def _latencies(family: Any, stats: Stats) -> Iterator[Any]:
    named: dict[str, tuple[str, Histogram]] = {
        "time_to_first_token": ("Seconds from submit to the first token.", stats.first_token_seconds),
        "time_between_tokens": ("Seconds before each further token.", stats.between_tokens_seconds),
    }
    for name, (what, latencies) in named.items():
        bounds = [str(bound) for bound in SECONDS] + ["+Inf"]
        buckets = [*zip(bounds, map(float, itertools.accumulate(latencies.counts)), strict=True)]
        yield family(f"speccompile_{name}_seconds", what, buckets=buckets, sum_value=latencies.sum)


def _labelled(metric: Any, values: dict[int, Any]) -> Any:
    for label, value in sorted(values.items()):
        metric.add_metric([str(label)], value)
    return metric

"""``/metrics``: the engine's own metrics, and beside them those that dashboards of vLLM read."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector

from speccompile.runtime.stats import SECONDS, Latencies
from speccompile.serve.service import Service


def metrics_text(service: Service) -> str:
    """All metrics in Prometheus' text format."""
    registry = CollectorRegistry()
    registry.register(_VllmNames(service))
    served = generate_latest(registry) + generate_latest(service.counts.registry)
    return service.spec.prometheus() + served.decode()


class _VllmNames(Collector):
    """vLLM's names for what the engine counts too, with vLLM's labels, and the server's own counts."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._labels = service.labels

    def collect(self) -> Iterator[Any]:
        stats, engine = self._service.spec.stats, self._service.engine
        capacity, running = engine.capacity(), len(engine.running)
        # Of each request the first token comes from its prompt, or a step; all are timed.
        new = sum(stats.between_tokens_seconds.counts) + sum(stats.first_token_seconds.counts)
        yield self._gauge("num_requests_running", "Requests that have a slot.", running)
        yield self._gauge("num_requests_waiting", "Requests that wait for a slot.", capacity.waiting)
        # The second names are those of older versions, which dashboards still have.
        for name in ("kv_cache_usage_perc", "gpu_cache_usage_perc"):
            yield self._gauge(name, "Share of the slots that have a request.", running / capacity.slots)
        yield self._counter("prompt_tokens", "Prompt tokens, those with known KV included.", stats.prompt_tokens)
        yield self._counter("generation_tokens", "New tokens.", new)
        yield self._counter("prefix_cache_queries", "Prompt tokens.", stats.prompt_tokens)
        yield self._counter("prefix_cache_hits", "Prompt tokens whose KV was there already.", stats.reused_tokens)
        drafts = stats.proposed_at[0] if stats.proposed_at else 0
        yield self._counter("spec_decode_num_drafts", "Drafts: rows of steps that had draft tokens.", drafts)
        yield self._counter("spec_decode_num_draft_tokens", "Draft tokens that were judged.", stats.draft_tokens)
        yield self._counter("spec_decode_num_accepted_tokens", "Draft tokens accepted.", stats.accepted_tokens)
        by_position = {str(position): count for position, count in enumerate(stats.accepted_at)}
        name, what = "spec_decode_num_accepted_tokens_per_pos", "Draft tokens accepted, by position from 0."
        yield self._counters(name, what, "position", by_position)
        finished = dict(self._service.counts.finished)
        yield self._counters("request_success", "Choices that ended, by reason.", "finished_reason", finished)
        yield self._histogram("time_to_first_token_seconds", "Seconds to the first token.", stats.first_token_seconds)
        for name in ("inter_token_latency_seconds", "time_per_output_token_seconds"):
            yield self._histogram(name, "Seconds before each further token.", stats.between_tokens_seconds)
        responses = CounterMetricFamily("speccompile_responses", "Responses by status.", labels=["status"])
        for status, count in sorted(self._service.counts.responses.items()):
            responses.add_metric([str(status)], count)
        yield responses

    def _gauge(self, name: str, what: str, value: float) -> GaugeMetricFamily:
        family = GaugeMetricFamily(f"vllm:{name}", what, labels=list(self._labels))
        family.add_metric(list(self._labels.values()), value)
        return family

    def _counter(self, name: str, what: str, value: float) -> CounterMetricFamily:
        family = CounterMetricFamily(f"vllm:{name}", what, labels=list(self._labels))
        family.add_metric(list(self._labels.values()), value)
        return family

    def _counters(self, name: str, what: str, label: str, values: dict[str, int]) -> CounterMetricFamily:
        family = CounterMetricFamily(f"vllm:{name}", what, labels=[*self._labels, label])
        for value, count in values.items():
            family.add_metric([*self._labels.values(), value], count)
        return family

    def _histogram(self, name: str, what: str, latencies: Latencies) -> HistogramMetricFamily:
        family = HistogramMetricFamily(f"vllm:{name}", what, labels=list(self._labels))
        bounds = [str(bound) for bound in SECONDS] + ["+Inf"]
        buckets = [*zip(bounds, map(float, itertools.accumulate(latencies.counts)), strict=True)]
        family.add_metric(list(self._labels.values()), buckets, latencies.sum)
        return family

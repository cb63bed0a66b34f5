"""Endpoint ``/metrics``: the engine's metrics, and those that dashboards of vLLM read."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterable, Iterator
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector

from speccompile.runtime.kv_use import KVUse
from speccompile.runtime.request import Request
from speccompile.runtime.stats import Histogram
from speccompile.serve.service import Service

#: Counters that are always 0 here.
_NEVER = {
    "corrupted_requests": "Requests that continued with NaN in their logits: none, since they end.",
    "external_prefix_cache_hits": "Prompt tokens with KV from elsewhere: none.",
    "external_prefix_cache_queries": "Prompt tokens whose KV was requested elsewhere: none.",
    "mm_cache_hits": "Images that a cache of images had: none, since a known beginning of a prompt has them.",
    "mm_cache_queries": "Images that were looked up in a cache of images: none.",
}


def metrics_text(service: Service) -> str:
    """All metrics in Prometheus' text format."""
    registry = CollectorRegistry()
    registry.register(_VllmNames(service))
    served = generate_latest(registry) + generate_latest(service.counts.registry)
    return service.spec.prometheus() + served.decode()


class _VllmNames(Collector):
    """The engine's counts under vLLM's names and labels, and the server's counts."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._labels = service.labels

    def collect(self) -> Iterator[Any]:
        stats, engine = self._service.spec.stats, self._service.engine
        capacity, running, kv = engine.capacity(), len(engine.running), self._service.spec.memory()
        # The first token of a request comes from its prompt or a step. Both histograms together count all tokens.
        new = sum(stats.between_tokens_seconds.counts) + sum(stats.first_token_seconds.counts)
        reused = stats.reused_tokens
        yield self._gauge("num_requests_running", "Requests that have a slot.", running)
        yield self._gauge("num_requests_waiting", "Requests that wait for a slot.", capacity.waiting)
        reasons = {"capacity": capacity.waiting, "deferred": 0}
        yield self._gauges("num_requests_waiting_by_reason", "Requests that wait, by reason.", "reason", reasons)
        states = {"awake": 1, "weights_offloaded": 0, "discard_all": 0}
        yield self._gauges("engine_sleep_state", "1 for awake, which the engine always is.", "sleep_state", states)
        # The second name is that of older versions of vLLM, which dashboards still use.
        for name in ("kv_cache_usage_perc", "gpu_cache_usage_perc"):
            yield self._gauge(name, "Share of the KV that running requests hold.", kv.running / kv.pages)
        for prefix in ("", "gpu_"):
            yield self._counter(f"{prefix}prefix_cache_queries", "Prompt tokens.", stats.prompt_tokens)
            yield self._counter(f"{prefix}prefix_cache_hits", "Prompt tokens whose KV was there already.", reused)
        yield self._cache_config(kv)
        if self._service.spec.adapters:
            yield self._adapters()
        for name, what in _NEVER.items():
            yield self._counter(name, what, 0)
        yield self._counter("num_preemptions", "Requests that gave their pages to another one.", stats.preemptions)
        yield self._counter("prompt_tokens", "Prompt tokens, those with known KV included.", stats.prompt_tokens)
        yield self._counter("prompt_tokens_cached", "Prompt tokens whose KV was there already.", reused)
        yield self._counter("prompt_tokens_recomputed", "Prompt tokens that were read again.", stats.reread_tokens)
        sources = {"local_compute": stats.prompt_tokens - reused, "local_cache_hit": reused, "external_kv_transfer": 0}
        yield self._counters("prompt_tokens_by_source", "Prompt tokens by source.", "source", sources)
        yield self._counter("generation_tokens", "New tokens.", new)
        yield self._histogram("iteration_tokens_total", "Prompt tokens and new ones of a step.", stats.step_tokens)
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

    def _gauges(self, name: str, what: str, label: str, values: dict[str, int]) -> GaugeMetricFamily:
        family = GaugeMetricFamily(f"vllm:{name}", what, labels=[*self._labels, label])
        for value, count in values.items():
            family.add_metric([*self._labels.values(), value], count)
        return family

    def _histogram(self, name: str, what: str, values: Histogram) -> HistogramMetricFamily:
        family = HistogramMetricFamily(f"vllm:{name}", what, labels=list(self._labels))
        bounds = [str(bound) for bound in values.bounds] + ["+Inf"]
        buckets = [*zip(bounds, map(float, itertools.accumulate(values.counts)), strict=True)]
        family.add_metric(list(self._labels.values()), buckets, values.sum)
        return family

    def _cache_config(self, kv: KVUse) -> GaugeMetricFamily:
        """KV cache in vLLM's terms. Without a pool a slot is one block with as many tokens as a sequence may have."""
        pooled = self._service.engine.slots.pool is not None
        labels = {
            "block_size": str(kv.page_tokens if pooled else self._service.max_len),
            "num_gpu_blocks": str(kv.pages),
            "enable_prefix_caching": str(self._service.engine.prefix_reuse),
            "engine": self._labels["engine"],
        }
        family = GaugeMetricFamily("vllm:cache_config_info", "The size of the KV cache.", labels=list(labels))
        family.add_metric(list(labels.values()), 1)
        return family

    def _adapters(self) -> GaugeMetricFamily:
        """Adapters in use. As in vLLM, the value is the time, and the labels have the names."""
        engine = self._service.engine
        labels = {
            "max_lora": str(len(self._service.spec.adapters)),
            "waiting_lora_adapters": _adapter_names(engine.waiting.requests),
            "running_lora_adapters": _adapter_names(engine.running),
        }
        family = GaugeMetricFamily("vllm:lora_requests_info", "The adapters of the requests.", labels=list(labels))
        family.add_metric(list(labels.values()), time.time())
        return family


def _adapter_names(requests: Iterable[Request]) -> str:
    return ",".join(sorted({item.params.adapter.name for item in requests if item.params.adapter is not None}))

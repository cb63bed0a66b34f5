"""Counts of the server's requests under vLLM's names. The engine's statistics are separate."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from prometheus_client import CollectorRegistry, Histogram

from speccompile.runtime.request import Request

#: vLLM's ``finished_reason``, by the engine's reason. A request without a reason was left by its client.
_REASONS = {"eos": "stop", "stop": "stop", "max_new_tokens": "length", "max_len": "length", "error": "error"}
#: Upper bounds of the histograms: seconds of a request, seconds of a token, tokens, choices.
_SECONDS = (0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)
_TOKEN_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 10)
_TOKENS = tuple(digit * 10**power for power in range(6) for digit in (1, 2, 5))
_CHOICES = (1, 2, 5, 10, 20)
#: Description and bounds of each histogram.
_HISTOGRAMS = {
    "e2e_request_latency_seconds": ("Seconds from the submission of a choice to its end.", _SECONDS),
    "request_queue_time_seconds": ("Seconds that a choice waited for a slot.", _SECONDS),
    "request_prefill_time_seconds": ("Seconds from the slot to the first token.", _SECONDS),
    "request_decode_time_seconds": ("Seconds from the first token to the end.", _SECONDS),
    "request_inference_time_seconds": ("Seconds from the slot to the end.", _SECONDS),
    "request_time_per_output_token_seconds": ("Mean seconds of a choice's token after the first.", _TOKEN_SECONDS),
    "request_prompt_tokens": ("Tokens of a choice's prompt.", _TOKENS),
    "request_prefill_kv_computed_tokens": ("Tokens of a choice's prompt that were read.", _TOKENS),
    "request_generation_tokens": ("New tokens of a choice.", _TOKENS),
    "request_max_num_generation_tokens": ("New tokens of the longest choice of a request.", _TOKENS),
    "request_params_max_tokens": ("Most new tokens that a choice may have.", _TOKENS),
    "request_params_n": ("Choices of a request.", _CHOICES),
}


class Counts:
    """Counts since the start. ``responses`` are by status, ``finished`` are choices by vLLM's ``finished_reason``.

    Args:
        labels: labels of all metrics, by name.
    """

    def __init__(self, labels: dict[str, str]) -> None:
        self.responses: Counter[int] = Counter()
        self.finished: Counter[str] = Counter()
        self.registry = CollectorRegistry()
        self._histograms = {
            name: Histogram(f"vllm:{name}", what, list(labels), registry=self.registry, buckets=bounds).labels(**labels)
            for name, (what, bounds) in _HISTOGRAMS.items()
        }

    def count(self, status: int, requests: Sequence[Request]) -> None:
        """Count a response that has ended; ``requests`` are its choices."""
        self.responses[status] += 1
        for request in requests:
            self._count_choice(request)
        if requests:
            self._observe("request_max_num_generation_tokens", max(len(request.new_tokens) for request in requests))
            self._observe("request_params_n", len(requests))

    def _count_choice(self, request: Request) -> None:
        self.finished[_REASONS.get(request.finish_reason, "abort")] += 1
        timings, new = request.timings, len(request.new_tokens)
        self._observe("e2e_request_latency_seconds", timings.total)
        self._observe("request_prompt_tokens", len(request.prompt))
        self._observe("request_prefill_kv_computed_tokens", request.stats.prefill_tokens)
        self._observe("request_generation_tokens", new)
        self._observe("request_params_max_tokens", request.params.max_new_tokens)
        if timings.queued is None:
            return
        self._observe("request_queue_time_seconds", timings.queued)
        self._observe("request_inference_time_seconds", timings.total - timings.queued)
        if timings.first_token is None:
            return
        decode = timings.total - timings.first_token
        self._observe("request_prefill_time_seconds", timings.first_token - timings.queued)
        self._observe("request_decode_time_seconds", decode)
        if new > 1:
            self._observe("request_time_per_output_token_seconds", decode / (new - 1))

    def _observe(self, name: str, value: float) -> None:
        self._histograms[name].observe(value)

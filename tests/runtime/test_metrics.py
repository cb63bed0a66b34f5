"""Counters as Prometheus reads them."""

from __future__ import annotations

import re
import sys

import pytest

import speccompile
from speccompile.errors import InvalidOption
from speccompile.runtime.metrics import prometheus_text
from speccompile.runtime.stats import RequestStats, Stats
from support.errors import raises
from support.tiny import tiny_llama


def test_all_counters_are_exposed() -> None:
    pytest.importorskip("prometheus_client")
    stats = Stats(2)
    stats.count_step(2, 1, proposed=True)
    stats.count_seconds(2, 0.5)
    stats.count(2, 1, 2)
    for accepted in (1, 2):
        request = RequestStats(2)
        request.count(accepted + 1, accepted, 2)
        request.count(1, 0, 1)
        stats.count_request(request)
    stats.count_tokens(1, 0.3, first=True)
    stats.count_tokens(4, 0.08, first=False)
    stats.count_tokens(1, 200.0, first=False)
    lines = prometheus_text(stats, running=2, waiting=5).splitlines()
    for line in (
        "speccompile_steps_total 1.0",
        "speccompile_no_proposal_steps_total 0.0",
        "speccompile_rejected_tokens_total 1.0",
        'speccompile_tier_steps_total{draft_len="2"} 1.0',
        'speccompile_tier_seconds_total{draft_len="2"} 0.5',
        'speccompile_accepted_at_total{position="1"} 1.0',
        'speccompile_accepted_at_total{position="2"} 0.0',
        "speccompile_ended_requests_total 2.0",
        # Of the first position half of each request's drafts was accepted, of the second none and all.
        'speccompile_request_accepted_share_bucket{le="0.4",position="1"} 0.0',
        'speccompile_request_accepted_share_bucket{le="0.5",position="1"} 2.0',
        'speccompile_request_accepted_share_bucket{le="0.0",position="2"} 1.0',
        'speccompile_request_accepted_share_bucket{le="0.9",position="2"} 1.0',
        'speccompile_request_accepted_share_bucket{le="+Inf",position="2"} 2.0',
        'speccompile_request_accepted_share_sum{position="1"} 1.0',
        'speccompile_request_accepted_share_count{position="2"} 2.0',
        "# TYPE speccompile_running_requests gauge",
        "speccompile_running_requests 2.0",
        "speccompile_waiting_requests 5.0",
        "# TYPE speccompile_time_to_first_token_seconds histogram",
        'speccompile_time_to_first_token_seconds_bucket{le="0.25"} 0.0',
        'speccompile_time_to_first_token_seconds_bucket{le="0.5"} 1.0',
        "speccompile_time_to_first_token_seconds_sum 0.3",
        # Four tokens of one step share its 80 ms.
        'speccompile_time_between_tokens_seconds_bucket{le="0.01"} 0.0',
        'speccompile_time_between_tokens_seconds_bucket{le="0.025"} 4.0',
        'speccompile_time_between_tokens_seconds_bucket{le="100.0"} 4.0',
        'speccompile_time_between_tokens_seconds_bucket{le="+Inf"} 5.0',
        "speccompile_time_between_tokens_seconds_count 5.0",
    ):
        assert line in lines, line


def test_residency_and_what_requests_left() -> None:
    stats = Stats(2)
    assert stats.tier_residency == {}
    for draft_len in (2, 0, 2, 2):
        stats.count_step(draft_len, 1, proposed=True)
    assert stats.tier_residency == {0: 0.25, 2: 0.75}
    # One without drafts has no share.
    stats.count_request(RequestStats(2))
    assert stats.ended_requests == 1 and not any(map(any, stats.request_shares))
    stats.reset()
    assert stats == Stats(2)


def test_a_wrap_shows_its_requests_and_their_latencies() -> None:
    """One runs in the only slot, one waits; every token but a request's first has a time before it."""
    pytest.importorskip("prometheus_client")
    with speccompile.wrap(
        tiny_llama(), "ngram", tiers=(0, 3), max_batch=1, max_len=32, backend="eager", policy="fixed:3"
    ) as spec:
        requests = [spec.engine.submit([5, 3, 9, 5, 3, 9], max_new_tokens=8, eos_token_id=()) for _ in range(2)]
        while not requests[0].new_tokens:
            spec.engine.step()
        lines = spec.prometheus().splitlines()
        assert "speccompile_running_requests 1.0" in lines and "speccompile_waiting_requests 1.0" in lines
        for request in requests:
            request.result()
        lines = spec.prometheus().splitlines()
        assert "speccompile_running_requests 0.0" in lines and "speccompile_waiting_requests 0.0" in lines
        assert "speccompile_time_to_first_token_seconds_count 2.0" in lines
        assert "speccompile_time_between_tokens_seconds_count 14.0" in lines
        timings = [request.timings for request in requests]
        # The first tokens' moments are taken once by the request and once for the histogram.
        first = spec.stats.first_token_seconds.sum
        assert first == pytest.approx(sum(timing.first_token or 0.0 for timing in timings), abs=0.05)
        whole = first + spec.stats.between_tokens_seconds.sum
        assert first < whole == pytest.approx(sum(timing.total for timing in timings), abs=0.05)


def test_the_library_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with raises(InvalidOption, name="prometheus", reason=re.compile(r"speccompile\[metrics\]")):
        prometheus_text(Stats(1), running=0, waiting=0)

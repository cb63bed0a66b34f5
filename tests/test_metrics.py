"""Counters as Prometheus reads them."""

from __future__ import annotations

import sys

import pytest

from speccompile.errors import InvalidOption
from speccompile.runtime.metrics import prometheus_text
from speccompile.runtime.stats import RequestStats, Stats


def test_what_is_shown() -> None:
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
    lines = prometheus_text(stats).splitlines()
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


def test_the_library_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with pytest.raises(InvalidOption, match=r"speccompile\[metrics\]"):
        prometheus_text(Stats(1))

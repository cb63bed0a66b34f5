"""Counters as Prometheus reads them."""

from __future__ import annotations

import sys

import pytest

from speccompile.errors import InvalidOption
from speccompile.runtime.metrics import prometheus_text
from speccompile.runtime.stats import Stats


def test_what_is_shown() -> None:
    pytest.importorskip("prometheus_client")
    stats = Stats(2)
    stats.count_step(2, 1, proposed=True)
    stats.count_seconds(2, 0.5)
    stats.count(2, 1, 2)
    lines = prometheus_text(stats).splitlines()
    for line in (
        "speccompile_steps_total 1.0",
        "speccompile_no_proposal_steps_total 0.0",
        "speccompile_rejected_tokens_total 1.0",
        'speccompile_tier_steps_total{draft_len="2"} 1.0',
        'speccompile_tier_seconds_total{draft_len="2"} 0.5',
        'speccompile_accepted_at_total{position="1"} 1.0',
        'speccompile_accepted_at_total{position="2"} 0.0',
    ):
        assert line in lines, line


def test_the_library_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with pytest.raises(InvalidOption, match=r"speccompile\[metrics\]"):
        prometheus_text(Stats(1))

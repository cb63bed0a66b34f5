"""What a step costs over several ranks, on paper."""

from __future__ import annotations

from dataclasses import replace

import pytest

from speccompile.tools.rank_costs import (
    LLAMA_8B,
    RankSpeeds,
    best_draft_len,
    emitted,
    fitted,
    gain,
    step_seconds,
)

FAST = RankSpeeds(read=2e12, link=450e9, latency=10e-6)


def test_one_rank_reads_its_weights_and_sends_nothing() -> None:
    assert step_seconds(LLAMA_8B, FAST, ranks=1, width=1) == LLAMA_8B.weights / FAST.read


def test_two_ranks_by_hand() -> None:
    machine = RankSpeeds(read=1e9, link=1e6, latency=0.5, ring=False, place=0.0)
    model = replace(LLAMA_8B, weights=4e9, whole=1e9, layers=1, hidden=1000, value_bytes=2)
    # 4 of 8 thousand million bytes halved and one whole; three sums of half a second and 3 * 2,000 bytes; two more.
    assert step_seconds(model, machine, ranks=2, width=3) == pytest.approx(3 + 3 * (0.5 + 6000 / 1e6) + 1)
    ring = replace(machine, ring=True)
    assert step_seconds(model, ring, ranks=4, width=1) == pytest.approx(2 + 3 * (0.5 + 1.5 * 2000 / 1e6) + 1)


def test_drafts_that_are_never_right_never_pay() -> None:
    assert emitted(7, 0.0) == 1 and emitted(2, 0.5) == 1.75
    assert best_draft_len(LLAMA_8B, FAST, ranks=2, chance=0.0) == 0
    assert gain(LLAMA_8B, FAST, 0, ranks=2) == 1


def test_a_link_without_bytes_ends_what_speculation_gains() -> None:
    slow = replace(FAST, link=1e8)
    lengths = [best_draft_len(LLAMA_8B, slow, ranks=count, rows=8) for count in (1, 2, 8)]
    assert lengths == sorted(lengths, reverse=True) and lengths[0] > 0 and lengths[-1] == 0


def test_a_machine_is_found_from_what_it_takes() -> None:
    machine = RankSpeeds(read=1e9, link=1e8, latency=2e-4, ring=False, place=0.03)
    model = replace(LLAMA_8B, weights=4e8, whole=1e8)
    steps = {width: step_seconds(model, machine, ranks=1, width=width) for width in (1, 2, 4, 8)}
    sums = {size: machine.latency + size / machine.link for size in (1000, 4000, 100_000)}
    found = fitted(model, steps, sums, ring=False)
    for name in ("read", "link", "latency", "place"):
        assert getattr(found, name) == pytest.approx(getattr(machine, name), rel=1e-6)
    assert not found.ring


def test_attention_that_is_whole_saves_a_sum_of_each_layer() -> None:
    assert replace(LLAMA_8B, sums_per_layer=1).sums == 33 and LLAMA_8B.sums == 65

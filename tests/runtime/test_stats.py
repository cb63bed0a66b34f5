"""Counters, held against a trace that was counted by hand, and against what a real decode did."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import speccompile
from speccompile import Speculator
from speccompile.runtime.prefill import next_width
from speccompile.runtime.stats import Counters, RequestStats, Stats
from support.tiny import tiny_llama


def traced() -> Stats:
    """Four row-steps with Kmax 3: (emitted, accepted, proposed)."""
    stats = Stats(3)
    stats.count(4, 3, 3)
    stats.count(1, 0, 3)
    stats.count(2, 1, 2)
    stats.count(1, 0, 0)
    return stats


def test_a_trace_counted_by_hand() -> None:
    stats = traced()
    assert stats.row_steps == 4
    assert stats.emitted_tokens == 8
    assert stats.accepted_tokens == 4
    assert stats.draft_tokens == 8
    assert stats.acceptance_length == 8 / 4
    # Place 0 was offered three times and accepted twice; place 1 three times, once; place 2 twice, once.
    assert stats.proposed_at == [3, 3, 2]
    assert stats.accepted_at == [2, 1, 1]
    assert stats.per_position == [2 / 3, 1 / 3, 1 / 2]


def test_an_accepted_end_leaves_offered_drafts_behind_it() -> None:
    """An EOS among the drafts: three were offered, two accepted, the second of them the end, and no bonus token."""
    counters = Counters(3)
    counters.count(2, 2, 3)
    assert counters.per_position == [1.0, 1.0, 0.0]
    assert counters.acceptance_length == 2


def test_before_the_first_step() -> None:
    stats = Stats(7)
    assert stats.acceptance_length == 0.0
    assert stats.per_position == [0.0] * 7
    assert stats.tier_steps == {}
    assert stats.requests == []


def test_without_drafts_the_acceptance_length_is_one() -> None:
    stats = Stats(0)
    stats.count(1, 0, 0)
    assert stats.per_position == []
    assert stats.acceptance_length == 1.0


def test_steps_are_counted_by_tier_and_rows() -> None:
    stats = Stats(7)
    for draft_len, rows in ((7, 1), (3, 4), (7, 4), (0, 2), (7, 4)):
        stats.count_step(draft_len, rows, proposed=draft_len > 0)
    assert stats.steps == stats.target_passes == 5
    assert stats.tier_steps == {7: 3, 3: 1, 0: 1}
    assert stats.rows_steps == {1: 1, 4: 3, 2: 1}


def test_prefill_is_counted_apart_from_steps() -> None:
    stats = Stats(7)
    for tokens in (64, 64, 5):
        stats.count_prefill(tokens)
    assert (stats.prefill_passes, stats.prefill_tokens) == (3, 133)
    assert (stats.steps, stats.row_steps) == (0, 0)


def test_reset_sets_every_counter_to_zero() -> None:
    stats = traced()
    stats.count_step(3, 1, proposed=True)
    stats.count_prefill(8)
    stats.reused_tokens = 2
    stats.requests.append(RequestStats(3))
    stats.reset()
    assert stats == Stats(3)
    # What is counted afterwards is no one else's.
    stats.count(4, 3, 3)
    stats.count_step(3, 2, proposed=True)
    assert (stats.emitted_tokens, stats.proposed_at, stats.tier_steps) == (4, [1, 1, 1], {3: 1})
    assert stats.rows_steps == {2: 1}
    assert Stats(3).tier_steps == Stats(3).rows_steps == {}


def test_two_counters_share_nothing() -> None:
    first, second = RequestStats(3), RequestStats(3)
    first.count(4, 3, 3)
    assert second == RequestStats(3)


@given(
    st.lists(
        # Accepted and proposed draft tokens of a step.
        st.integers(0, 7).flatmap(lambda proposed: st.tuples(st.integers(0, proposed), st.just(proposed)))
    )
)
def test_counters_by_place_add_up_to_the_totals(trace: list[tuple[int, int]]) -> None:
    counters = Counters(7)
    for accepted, proposed in trace:
        counters.count(accepted + 1, accepted, proposed)
    assert sum(counters.proposed_at) == counters.draft_tokens
    assert sum(counters.accepted_at) == counters.accepted_tokens
    assert counters.emitted_tokens == counters.accepted_tokens + counters.row_steps
    assert counters.accepted_at == sorted(counters.accepted_at, reverse=True)


# --- in a decode -------------------------------------------------------------------------------------------------


def wrap(**options: int) -> Speculator:
    """Every prompt is read, so the counts do not depend on what ran before."""
    return speccompile.wrap(
        tiny_llama(),
        "early_exit",
        tiers=(0, 3),
        max_len=128,
        backend="eager",
        policy="fixed:3",
        prefix_reuse=False,
        **options,
    )


@pytest.fixture(scope="module")
def spec() -> Speculator:
    return wrap(exit_layer=1, max_batch=3)


@pytest.fixture(scope="module")
def always_right() -> Speculator:
    return wrap(exit_layer=2, max_batch=1)


def random_ids(rows: int, length: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(128, (rows, length), generator=torch.Generator().manual_seed(seed))


def test_totals_are_the_sums_over_requests(spec: Speculator) -> None:
    spec.stats.reset()
    spec.set_tier(3)
    spec.generate(random_ids(3, 40), max_new_tokens=25)
    stats, requests = spec.stats, spec.stats.requests
    assert len(requests) == 3
    for name in ("row_steps", "emitted_tokens", "draft_tokens", "accepted_tokens"):
        assert getattr(stats, name) == sum(getattr(request, name) for request in requests), name
    for name in ("proposed_at", "accepted_at"):
        columns = zip(*(getattr(request, name) for request in requests), strict=True)
        assert getattr(stats, name) == [sum(column) for column in columns], name
    for request in requests:
        # Prefill emits the first token; it is not a step.
        assert request.prompt_tokens == request.prefill_tokens == 40
        assert request.reused_tokens == 0
        assert request.new_tokens == 25 == request.emitted_tokens + 1
        assert request.emitted_tokens == request.accepted_tokens + request.row_steps
        assert request.finish_reason == "max_new_tokens"
    chunks, left = 0, 40
    while left > 0:
        chunks, left = chunks + 1, left - next_width(left, list(spec.prefill))
    assert stats.prefill_passes == 3 * chunks
    assert (stats.prefill_tokens, stats.reused_tokens) == (3 * 40, 0)
    assert stats.steps == max(request.row_steps for request in requests)
    # Executables of 1, 2 and 3 rows: as many steps of each as there were steps with so many live rows.
    ends = [0, *sorted(request.row_steps for request in requests)]
    lasted = {3 - ended: ends[ended + 1] - ends[ended] for ended in range(3)}
    assert stats.rows_steps == {rows: steps for rows, steps in lasted.items() if steps}
    assert 0 < stats.accepted_tokens < stats.draft_tokens


def test_counts_go_on_over_calls_and_requests_are_the_newest(spec: Speculator) -> None:
    spec.stats.reset()
    spec.set_tier(0)
    spec.generate(random_ids(2, 5), max_new_tokens=10)
    spec.generate(random_ids(1, 5), max_new_tokens=4)
    assert spec.stats.steps == 9 + 3
    assert spec.stats.tier_steps == {0: 12}
    assert spec.stats.rows_steps == {2: 9, 1: 3}
    assert spec.stats.emitted_tokens == 2 * 9 + 3
    assert spec.stats.acceptance_length == 1.0
    assert spec.stats.draft_tokens == 0
    assert [request.new_tokens for request in spec.stats.requests] == [4]


@pytest.mark.parametrize(
    ("eos_at", "emitted", "accepted", "proposed"),
    [
        # Prefill emits new token 0; then the whole model drafts three tokens a step and all are accepted.
        (4, 4, 3, 3),  # the bonus token of step 1 is the end
        (5, 5, 4, 6),  # the first draft of step 2: accepted, and there is no bonus token after it
        (7, 7, 6, 6),  # the last draft of step 2
        (8, 8, 6, 6),  # its bonus token
    ],
)
def test_a_text_that_ends_among_the_drafts(
    always_right: Speculator, eos_at: int, emitted: int, accepted: int, proposed: int
) -> None:
    ids = random_ids(1, 9, seed=5)
    new = always_right.generate(ids, max_new_tokens=12)[0, 9:].tolist()
    assert len(set(new)) == 12, "no id was to occur twice"
    always_right.generate(ids, max_new_tokens=12, eos_token_id=new[eos_at])
    (request,) = always_right.stats.requests
    assert (request.emitted_tokens, request.accepted_tokens, request.draft_tokens) == (emitted, accepted, proposed)
    assert request.finish_reason == "eos"
    assert request.new_tokens == eos_at + 1

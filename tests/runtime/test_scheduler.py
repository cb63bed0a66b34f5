"""One step by the scheduler alone: what runs, whose tokens are handed out when, and what a fault costs."""

from __future__ import annotations

import time
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from speccompile.graph.state import K, N, S, StateSpec
from speccompile.modes.base import DRAFT_SOURCE
from speccompile.modes.ready_mode import proposal_state
from speccompile.policies import Done, Fixed, Ladder, Upcoming
from speccompile.runtime.options import StepTraits
from speccompile.runtime.request import Request
from speccompile.sampling.allowed import AllowedTokens
from speccompile.sampling.pipeline import sampling_state
from speccompile.sampling.request import Sampling
from support.engine_parts import Parts

#: Stands in for KV.
KV = StateSpec("kv", (N, S, 2), torch.int64, reset=False)


@dataclass(frozen=True)
class Notes:
    """A policy that learns: it wants 3 drafts, and keeps what it receives."""

    done: list[Done] = field(default_factory=list)
    upcoming: list[Upcoming] = field(default_factory=list)
    uses_costs: bool = False

    def check(self, draft_lens: Collection[int]) -> None: ...

    def start(self, ladder: Ladder) -> Notes:
        return self

    def choose(self, upcoming: Upcoming) -> int:
        self.upcoming.append(upcoming)
        return 3

    def note(self, done: Done) -> None:
        self.done.append(done)


def test_a_failure_in_what_the_host_does_for_one_row_ends_that_row_alone() -> None:
    parts, error = Parts(), MemoryError()
    failing, other = parts.running([1], new=9), parts.running([30], new=9)
    save = parts.slots.save_checkpoint

    def fails(request: Request) -> None:
        if request is failing:
            raise error
        save(request)

    parts.slots.save_checkpoint = fails  # type: ignore[method-assign]
    parts.scheduler.run_step()
    assert (failing.error, failing.new_tokens, other.new_tokens) == (error, [2], [31, 32])
    assert parts.batch.rows == [other] and parts.slots.free == 1


def test_a_step_without_rows_runs_nothing() -> None:
    parts = Parts()
    assert parts.scheduler.run_step() == [] and parts.runs == [] and parts.stats.steps == 0


# --- results that are read late ------------------------------------------------------------------


def test_what_was_emitted_for_a_request_that_ended_meanwhile_is_dropped() -> None:
    parts = Parts(late=True)
    ending, other = parts.running([1], new=9), parts.running([20], new=9)
    parts.scheduler.run_step()
    ending.end("cancelled")
    parts.scheduler.run_step()
    assert ending.new_tokens == [2] and other.new_tokens == [21, 22]
    assert ending.closed and parts.batch.rows == [other]
    assert (ending.stats.row_steps, parts.stats.row_steps) == (0, 1), "nor is it counted"


def test_a_row_that_asks_the_host_runs_when_its_newest_token_is_known() -> None:
    seen: list[list[int]] = []

    def allowed(row: int, text: torch.Tensor) -> list[int]:
        seen.append(text.tolist())
        return [1]

    parts = Parts(None, *sampling_state([AllowedTokens()]), late=True)
    parts.table.prepare("sampled")
    parts.running([1], new=4, sampling=Sampling({"prefix_allowed_tokens_fn": allowed}))
    while parts.batch.rows:
        parts.scheduler.run_step()
    assert seen == [[1], [1, 2], [1, 2, 3], [1, 2, 3, 4]]


# --- drafts whose logits are NaN -----------------------------------------------------------------


def test_a_row_that_emits_nothing_and_lives_goes_on_without_drafts() -> None:
    parts = Parts(Fixed(3))
    request = parts.running([1], new=9)
    parts.silent.add(request.slot)
    parts.scheduler.run_step()
    assert parts.batch.without_drafts == {request} and request.new_tokens == [2] and not request.finished
    parts.silent.clear()
    parts.scheduler.run_step()
    parts.scheduler.run_step()
    assert parts.runs == ["greedy K=3 B=1", "greedy K=0 B=1", "greedy K=3 B=1"] and not parts.batch.without_drafts


@pytest.mark.parametrize("clears", [False, True])
def test_what_its_drafts_left_is_cleared_where_attention_reads_it(clears: bool) -> None:
    parts = Parts(Fixed(3), KV, traits=StepTraits(reads_dead_positions=clears))
    request = parts.running([1, 2], new=9)
    parts.arena["kv"][request.slot] = 1
    parts.silent.add(request.slot)
    parts.scheduler.run_step()
    kept = parts.arena["kv"][request.slot].any(1)
    assert kept[: request.cached].all() and bool(kept[request.cached :].any()) == (not clears)


# --- what a policy receives -----------------------------------------------------------------------


def test_a_policy_that_learns_hears_of_each_step() -> None:
    policy = Notes()
    parts = Parts(policy)
    request = parts.running([1], new=9)
    parts.scheduler.run_step()
    (done,) = policy.done
    assert (done.draft_len, done.requests, done.contexts) == (3, (request.number,), (2,))
    assert (done.proposed, done.accepted, done.emitted) == ((3,), (3,), (4,))
    assert done.milliseconds is not None and done.milliseconds > 0


def test_the_cost_of_a_step_that_reads_along_is_unknown() -> None:
    policy = Notes()
    parts = Parts(policy)
    parts.table.prepare("greedy", watched=True)
    parts.running([10], new=9)
    parts.submit([1, 2, 3, 4])
    parts.scheduler.run_step()
    assert [done.milliseconds for done in policy.done] == [None]


def test_the_cost_of_a_step_that_is_read_late_is_what_the_clock_reports() -> None:
    policy = Notes()
    parts = Parts(policy, late=True)
    parts.running([10], new=9)
    parts.before = lambda: time.sleep(0.002)
    parts.scheduler.run_step()
    started = time.perf_counter()
    time.sleep(0.05)
    parts.scheduler.run_step()
    (done,) = policy.done
    assert done.milliseconds is not None and 2 <= done.milliseconds < 1e3 * (time.perf_counter() - started)
    assert parts.stats.tier_seconds == {3: done.milliseconds / 1e3}
    assert [upcoming.unread for upcoming in policy.upcoming] == [0, 1]


# --- drafts that are ready ------------------------------------------------------------------------


def ready(policy: Any, *, late: bool) -> Parts:
    """With a drafter that scores its drafts, one of several."""
    source = StateSpec(DRAFT_SOURCE, (N,), torch.int64)
    specs = (*proposal_state(), source, StateSpec("draft_score", (N, K), torch.float32))
    return Parts(policy, *specs, traits=StepTraits(ready=True), late=late)


@pytest.mark.parametrize(("late", "expected"), [(False, [0, 3, 0, 3, 0]), (True, [0, 0, 3, 0, 3])])
def test_the_tier_follows_the_newest_proposal_that_was_read(late: bool, expected: list[int]) -> None:
    parts = ready(Fixed(3), late=late)
    parts.running([1], new=20)
    parts.proposes += [{"draft_lens": count} for count in (3, 0, 1, 0, 0)]
    for _ in expected:
        parts.scheduler.run_step()
    assert parts.runs == [f"greedy K={draft_len} B=1" for draft_len in expected]


@pytest.mark.parametrize("late", [False, True])
def test_scores_and_source_are_those_of_the_drafts_that_the_step_judged(late: bool) -> None:
    policy = Notes()
    parts = ready(policy, late=late)
    request = parts.running([1], new=20)
    chances = [[0.75, 0.5, 0.1], [0.25, 0.2, 0.125], [0.3, 0.2, 0.0]]
    parts.proposes += [{"draft_lens": 3, "draft_score": own, DRAFT_SOURCE: at} for at, own in enumerate(chances)]
    for _ in range(3 + late):
        parts.scheduler.run_step()
    first, second, _ = (tuple(torch.tensor(own).tolist()) for own in chances)
    # A late step is chosen before the first proposal is known, so it has no drafts.
    assert [done.scores for done in policy.done] == [((),), ((),) if late else (first,), (second,)]
    assert [done.contexts for done in policy.done] == [(2,), (3,), (4,) if late else (7,)]
    assert request.stats.drafts_by == {0: (0, 0) if late else (3, 3), 1: (3, 3)}


@pytest.mark.parametrize("late", [False, True])
def test_a_step_counts_as_one_without_drafts_if_it_had_none(late: bool) -> None:
    parts = ready(Fixed(3), late=late)
    parts.running([1], new=20)
    parts.proposes += [{"draft_lens": count} for count in (3, 0)]
    while parts.batch.rows:
        parts.scheduler.run_step()
    assert parts.stats.no_proposal_steps == parts.stats.steps - 1

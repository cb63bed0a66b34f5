"""The tier of the next step: draft length, row count and kind."""

from __future__ import annotations

import pytest

from speccompile.graph.keys import Kind
from speccompile.modes.ready_mode import proposal_state
from speccompile.policies import Fixed
from speccompile.runtime.options import StepTraits
from speccompile.runtime.proposal import Proposal
from speccompile.sampling.request import Sampling
from support.engine_parts import Parts, request_of

READY = StepTraits(ready=True)


def draft_len(parts: Parts) -> int:
    return parts.choice.draft_len(parts.choice.policy_inputs(), 0)


@pytest.mark.parametrize(("proposed", "expected"), [([0, 0], 0), ([1, 0], 3), ([3, 3], 3)])
def test_of_a_ready_drafter_the_smallest_tier_that_serves_its_proposals(proposed: list[int], expected: int) -> None:
    parts = Parts(Fixed(3), *proposal_state(), traits=READY)
    for count in proposed:
        parts.running(new=9).proposal = Proposal(count)
    assert draft_len(parts) == expected


def test_the_policy_bounds_a_ready_drafter() -> None:
    parts = Parts(Fixed(0), *proposal_state(), traits=READY)
    parts.running(new=9).proposal = Proposal(3)
    assert draft_len(parts) == 0


def test_a_row_whose_drafts_failed_has_none_in_its_next_step() -> None:
    parts = Parts(Fixed(3))
    parts.batch.without_drafts.add(parts.running(new=9))
    assert draft_len(parts) == 0


@pytest.mark.parametrize(("reach", "expected"), [(4, 0), (5, 3), (20, 3)])
def test_no_drafts_where_all_rows_are_beyond_the_networks_reach(reach: int, expected: int) -> None:
    parts = Parts(Fixed(3), traits=StepTraits(reach=reach))
    # Three tokens with the first new one; the next is chosen anyhow, so a draft would be the fifth.
    parts.running([1, 2], new=9)
    assert draft_len(parts) == expected


@pytest.mark.parametrize(("sampling", "kind"), [(None, "greedy"), (Sampling({}), "sampled")])
def test_the_least_kind_that_serves_all_rows(sampling: Sampling | None, kind: Kind) -> None:
    parts = Parts()
    parts.batch.rows += [request_of(parts.arena), request_of(parts.arena, sampling=sampling)]
    assert parts.choice.name(3) == (3, 2, kind)


def test_the_next_tier_is_the_one_that_a_step_runs() -> None:
    parts = Parts(Fixed(3))
    parts.running(new=9)
    tier = parts.choice.next_tier()
    parts.scheduler.run_step()
    assert tier is parts.scheduler.tier and parts.runs == [tier.name]

"""The time-out of a run on a device, which waits for the other ranks' part of it."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
import torch.distributed as dist

from speccompile.errors import RankLost
from speccompile.ranks.ranks import Ranks
from support.errors import raises


@pytest.fixture
def ranks() -> Iterator[Ranks]:
    """A group of one."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    ranks = Ranks(dist.group.WORLD, timeout=0.05)
    yield ranks
    ranks.abandon()
    dist.destroy_process_group()


def test_a_run_that_finishes_is_waited_for(ranks: Ranks) -> None:
    looks = itertools.count()
    ranks.wait_for(lambda: next(looks) == 3)
    assert next(looks) == 4
    ranks.check_leads()


def test_a_run_that_never_finishes_is_a_lost_rank_from_then_on(ranks: Ranks) -> None:
    reason = "the device did not finish it within 0.05 s"
    with raises(RankLost, during="a step", reason=reason):
        ranks.wait_for(lambda: False)
    with raises(RankLost, during="a step", reason=reason):
        ranks.check_leads()

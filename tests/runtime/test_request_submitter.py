"""Requests are created after what they run is built, and queued; one that is refused leaves nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import pytest
import torch

from speccompile.errors import FollowerRank, QueueFull
from speccompile.graph.keys import Kind
from speccompile.ranks.ranks import Ranks
from speccompile.runtime.params import Params
from speccompile.runtime.request import Driver, NoDriver, Request
from speccompile.runtime.request_factory import Prepare, RequestFactory
from speccompile.runtime.request_options import SubmitOptions
from speccompile.runtime.request_submitter import RequestSubmitter
from speccompile.runtime.tier_table import TierTable
from support.engine_parts import request_of
from support.errors import raises
from support.loop_parts import TurnParts


class Factory:
    """Stands in for the factory of requests: counts those that it created, and keeps the cancelled records."""

    def __init__(self, parts: TurnParts) -> None:
        self._parts = parts
        self.made = 0
        self.cancelled: list[Params] = []

    def from_options(
        self,
        driver: Driver,
        prepare: Prepare,
        ids: Sequence[int] | torch.Tensor,
        options: SubmitOptions,
        inputs: object,
    ) -> Request:
        prepare("greedy", True)
        self.made += 1
        return request_of(self._parts.arena)

    def cancel_record(self, params: Params) -> None:
        self.cancelled.append(params)


class Table:
    """Stands in for the executables: which kinds are built."""

    def __init__(self) -> None:
        self.built: list[tuple[Kind, bool]] = []

    def prepared(self, kind: Kind, *, watched: bool) -> bool:
        return (kind, watched) in self.built

    def prepare(self, kind: Kind, *, watched: bool) -> None:
        self.built.append((kind, watched))


class Follower:
    """Stands in for the ranks, of which another one leads."""

    def check_leads(self) -> None:
        raise FollowerRank(rank=1)


class Bench:
    """A submitter over two slots and a queue of one."""

    def __init__(self, ranks: Any = None) -> None:
        self.parts = TurnParts()
        self.factory, self.table = Factory(self.parts), Table()
        self.submitter = RequestSubmitter(
            cast(RequestFactory, self.factory),
            cast(TierTable, self.table),
            self.parts.loop,
            self.parts.slots,
            self.parts.waiting,
            cast(Ranks | None, ranks),
            max_batch=2,
            captured=False,
        )

    def submit(self) -> Request:
        return self.submitter.submit(NoDriver(), [1, 2], SubmitOptions())


def test_what_a_request_runs_is_built_once() -> None:
    bench = Bench()
    bench.submit()
    bench.submit()
    assert bench.table.built == [("greedy", True)]


def test_a_request_that_finds_no_room_frees_its_record() -> None:
    bench = Bench()
    for _ in range(3):
        bench.submit()
    assert not bench.factory.cancelled
    with raises(QueueFull, count=1, waiting=3, limit=1):
        bench.submit()
    assert len(bench.factory.cancelled) == 1


def test_an_interrupt_cancels_the_request_that_the_caller_never_receives(monkeypatch: pytest.MonkeyPatch) -> None:
    bench, queued = Bench(), []

    def interrupted(requests: list[Request]) -> None:
        queued.extend(requests)
        raise KeyboardInterrupt

    monkeypatch.setattr(bench.parts.loop, "enqueue", interrupted)
    with pytest.raises(KeyboardInterrupt):
        bench.submit()
    assert [request.finish_reason for request in queued] == ["cancelled"]


def test_a_rank_that_follows_creates_nothing() -> None:
    bench = Bench(Follower())
    with raises(FollowerRank, rank=1):
        bench.submit()
    assert (bench.factory.made, bench.table.built) == (0, [])

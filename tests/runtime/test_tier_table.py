"""The table of executables: kinds are built once, when they are needed, and a table that is read does not change."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from types import SimpleNamespace
from typing import cast

import pytest

from speccompile.graph.keys import Kind, PrefillName, TierName
from speccompile.lowering.tier import Executables, Tier
from speccompile.runtime.tier_table import TierTable
from support.engines import threads


def tier() -> Tier:
    return cast(Tier, SimpleNamespace())


class Builds:
    """Makes executables of tiers with 0 and 3 drafts, over 1 and 2 rows, and notes what it was asked for."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def tiers(self, kind: Kind) -> dict[TierName, Tier]:
        return {(k, rows, kind): tier() for k in (3, 0) for rows in (2, 1)}

    def make(self, kind: Kind) -> Executables:
        self.asked.append(kind)
        chunks: dict[PrefillName, Tier] = {(4, kind): tier()}
        return Executables(self.tiers(kind), chunks)

    def make_mixed(self, kind: Kind) -> Mapping[TierName, Tier]:
        self.asked.append(f"mixed {kind}")
        return self.tiers(kind)


@pytest.fixture
def builds() -> Builds:
    return Builds()


@pytest.fixture
def table(builds: Builds) -> TierTable:
    return TierTable(Executables(builds.tiers("greedy"), {(4, "greedy"): tier()}), builds.make, builds.make_mixed)


def test_draft_lengths_and_row_counts_ascend(table: TierTable) -> None:
    assert (table.draft_lens, table.row_counts) == ((0, 3), (1, 2))
    assert list(table.tiers) == sorted(table.tiers), "the first one is the plain decoder of one row"


def test_what_the_wrap_has_built_is_not_built_again(table: TierTable, builds: Builds) -> None:
    assert table.prepared("greedy", watched=False)
    table.prepare("greedy")
    assert builds.asked == []


def test_a_kind_is_built_once_with_its_chunks(table: TierTable, builds: Builds) -> None:
    assert not table.prepared("sampled", watched=False)
    for _ in range(2):
        table.prepare("sampled")
    assert builds.asked == ["sampled"] and table.prepared("sampled", watched=False)
    assert {kind for *_, kind in table.tiers} == {kind for _, kind in table.prefill} == {"greedy", "sampled"}


def test_mixed_tiers_are_built_for_watched_requests_alone(table: TierTable, builds: Builds) -> None:
    table.prepare("sampled")
    assert not table.mixes("sampled") and not table.prepared("sampled", watched=True)
    for _ in range(2):
        table.prepare("sampled", watched=True)
    assert builds.asked == ["sampled", "mixed sampled"]
    assert table.mixes("sampled") and table.prepared("sampled", watched=True) and not table.mixes("greedy")


def test_a_step_that_reads_the_table_is_not_disturbed(table: TierTable) -> None:
    tiers, mixed, chunks = table.tiers, table.mixed_tiers, table.prefill
    table.prepare("sampled", watched=True)
    assert (len(tiers), len(mixed), len(chunks)) == (4, 0, 1)
    assert (len(table.tiers), len(table.mixed_tiers), len(table.prefill)) == (8, 4, 2)


def test_two_threads_that_need_a_kind_build_it_once(builds: Builds) -> None:
    make = builds.make

    def slow(kind: Kind) -> Executables:
        time.sleep(0.05)
        return make(kind)

    table = TierTable(Executables(builds.tiers("greedy"), {}), slow, builds.make_mixed)
    both = threading.Barrier(2)

    def prepare() -> None:
        both.wait()
        table.prepare("scored", watched=True)

    with threads(prepare, prepare):
        pass
    assert builds.asked == ["scored", "mixed scored"]

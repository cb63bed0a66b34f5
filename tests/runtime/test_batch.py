"""The rows of the next step, as the arena has them."""

from __future__ import annotations

import pytest

from speccompile.graph.arena import Arena
from speccompile.runtime.batch import Batch
from support.engine_parts import admitted, small_arena


@pytest.fixture
def arena() -> Arena:
    return small_arena()


def test_a_batch_binds_the_slots_of_its_rows(arena: Arena) -> None:
    batch, first, second = Batch(arena), admitted(arena, slot=1), admitted(arena, slot=0)
    batch.readers += [first, second]
    batch.join(first)
    assert batch.readers == [second] and arena["slots"].tolist() == [1, arena.layout.dummy_slot]
    batch.join(second)
    assert arena["slots"].tolist() == [1, 0] and batch.kind == "greedy"
    batch.without_drafts.add(first)
    batch.remove(first)
    batch.bind()
    assert arena["slots"].tolist() == [0, arena.layout.dummy_slot] and not batch.without_drafts


@pytest.mark.parametrize(
    ("mine", "others", "goes_first"), [(True, True, True), (True, False, False), (False, True, False)]
)
def test_a_prompt_goes_first_where_no_tokens_are_watched(
    arena: Arena, mine: bool, others: bool, goes_first: bool
) -> None:
    batch, request = Batch(arena), admitted(arena, patient=mine)
    assert batch.goes_first(request), "there are no rows to wait for it"
    batch.readers.append(other := admitted(arena, patient=others))
    batch.join(other)
    assert batch.goes_first(request) == goes_first

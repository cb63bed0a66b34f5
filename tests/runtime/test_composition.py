"""The engine is composed: its parts have typed constructors, do not know it, and work by themselves."""

from __future__ import annotations

import gc
import importlib
import inspect
import pkgutil
import weakref
from collections.abc import Iterator, Mapping
from types import SimpleNamespace
from typing import Any, Protocol, cast

import pytest
import torch

import speccompile
from speccompile import runtime
from speccompile.errors import UndecidedLogits
from speccompile.graph.arena import Arena
from speccompile.graph.keys import Kind, TierName
from speccompile.graph.state import core_state, resolve_layout
from speccompile.lowering.tier import Executables, Tier
from speccompile.runtime.batch import Batch
from speccompile.runtime.delivery import Delivery
from speccompile.runtime.departures import Departures
from speccompile.runtime.engine import Engine
from speccompile.runtime.listener import Listener
from speccompile.runtime.request import Params, Request
from speccompile.runtime.score_records import Records
from speccompile.runtime.slots import Slots
from speccompile.runtime.stats import RequestStats, Stats
from speccompile.runtime.tier_table import TierTable
from support.tiny import tiny_llama

PARTS = [
    "turns",
    "scheduler",
    "prompts",
    "choice",
    "table",
    "batch",
    "slots",
    "waiting",
    "policies",
    "_driver",
    "_factory",
]  # attributes of an engine


def classes() -> Iterator[type]:
    """Those that the files of runtime/ define."""
    for module in pkgutil.iter_modules(runtime.__path__):
        loaded = importlib.import_module(f"{runtime.__name__}.{module.name}")
        yield from (
            item for item in vars(loaded).values() if inspect.isclass(item) and item.__module__ == loaded.__name__
        )


def test_no_class_of_the_engine_inherits_from_another_one() -> None:
    for cls in classes():
        bases = [base for base in cls.__mro__[1:] if base.__module__.startswith(runtime.__name__)]
        if cls.__module__.endswith(".stats"):
            continue  # counters of one request and of all
        assert all(Protocol in base.__bases__ for base in bases), f"{cls.__name__} is a {bases}"


def test_constructors_name_what_they_take() -> None:
    for cls in classes():
        kinds = {parameter.kind for parameter in inspect.signature(cls).parameters.values()}
        if cls.__init__ is not object.__init__ and Protocol not in cls.__bases__:
            assert inspect.Parameter.VAR_KEYWORD not in kinds, cls.__name__


def test_no_part_knows_the_engine() -> None:
    with speccompile.wrap(tiny_llama(), "ngram", tiers=(0, 1), max_len=32, backend="eager") as spec:
        engine = spec.engine
        for name in PARTS:
            part = getattr(engine, name)
            assert not any(isinstance(held, Engine) for held in gc.get_referents(part, vars(part))), name
        gone = weakref.ref(engine)
        gc.disable()
        try:
            spec.close()
            del engine, part, spec
            assert gone() is None, "nothing but the speculator held it"
        finally:
            gc.enable()


def test_a_request_that_is_kept_keeps_no_arena() -> None:
    with speccompile.wrap(tiny_llama(), "ngram", tiers=(0, 1), max_len=32, backend="eager") as spec:
        finished = spec.engine.submit([1, 2, 3], max_new_tokens=4, logprobs=True)
        finished.result()
        cancelled = spec.engine.submit([1, 2, 3])
        spec.engine.step()
        arena = weakref.ref(spec.arena)
    del spec
    gc.collect()
    assert arena() is None
    assert finished.result().finish_reason == "max_new_tokens" and len(finished.result().logprobs or ()) == 4
    assert cancelled.result().finish_reason == "cancelled" and not cancelled.cancel()
    assert list(cancelled) == cancelled.new_tokens


# --- parts by themselves -------------------------------------------------------------------------


@pytest.fixture
def arena() -> Arena:
    layout = resolve_layout(core_state(16), max_batch=2, max_len=20, max_draft_len=1, max_width=2, vocab_size=16)
    return Arena(layout, torch.device("cpu"))


def request_of(
    arena: Arena, *, new: int = 4, eos: tuple[int, ...] = (), slot: int = 0, patient: bool = False
) -> Request:
    params = Params(max_new_tokens=new, eos=eos, sampling=None, patient=patient)
    listener = Listener(torch.tensor([[1, 2]]), new, None, cast(Any, []))
    request = Request(cast(Any, None), [1, 2], params, listener, RequestStats(1, 2), Records(params.wanted, arena))
    request.admit(slot, 0)
    return request


def test_a_batch_binds_the_slots_of_its_rows(arena: Arena) -> None:
    batch, first, second = Batch(arena), request_of(arena, slot=1), request_of(arena, slot=0)
    batch.reader = first
    batch.join(first)
    assert batch.reader is None and arena["slots"].tolist() == [1, arena.layout.dummy_slot]
    batch.join(second)
    assert arena["slots"].tolist() == [1, 0] and batch.kind == "greedy"
    batch.stuck.add(first)
    batch.remove(first)
    batch.bind()
    assert arena["slots"].tolist() == [0, arena.layout.dummy_slot] and not batch.stuck


@pytest.mark.parametrize(
    ("mine", "others", "hurries"), [(True, True, True), (True, False, False), (False, True, False)]
)
def test_a_prompt_goes_first_where_no_tokens_are_watched(arena: Arena, mine: bool, others: bool, hurries: bool) -> None:
    batch, request = Batch(arena), request_of(arena, patient=mine)
    assert batch.hurries(request), "there are no rows to wait for it"
    batch.join(request_of(arena, patient=others))
    assert batch.hurries(request) == hurries


@pytest.mark.parametrize(
    ("new", "eos", "reason"),
    [([7], (7,), "eos"), ([3, 4, 5, 6], (7,), "max_new_tokens"), ([3], (7,), "error")],
)
def test_delivery_finds_out_why_a_row_has_ended(
    arena: Arena, new: list[int], eos: tuple[int, ...], reason: str
) -> None:
    slots, stats = Slots(arena, lambda: 0, reuse=False, clear=False), Stats(1)
    departures = Departures(Batch(arena), slots, stats, None)
    request = request_of(arena, eos=eos)
    Delivery(departures, stats, max_len=20).hand_out(request, new, False, {})
    assert (request.new_tokens, request.finish_reason) == (new, reason)
    assert isinstance(request.error, UndecidedLogits) == (reason == "error")


def test_what_a_callback_raises_ends_its_request_alone_and_an_interrupt_is_kept(arena: Arena) -> None:
    slots, stats, batch = Slots(arena, lambda: 0, reuse=False, clear=False), Stats(1), Batch(arena)
    departures = Departures(batch, slots, stats, None)
    failing, other = request_of(arena, slot=0), request_of(arena, slot=1)
    batch.join(failing)
    batch.join(other)
    departures.fail([failing], KeyboardInterrupt())
    assert batch.rows == [other] and failing.finished and failing.closed and not other.finished
    assert isinstance(departures.take_interrupt(), KeyboardInterrupt) and departures.take_interrupt() is None


def test_a_table_builds_each_kind_once() -> None:
    built: list[str] = []

    def tiers(kind: Kind) -> Mapping[TierName, Tier]:
        return {(k, rows, kind): cast(Tier, SimpleNamespace()) for k in (3, 0) for rows in (2, 1)}

    def make(kind: Kind) -> Executables:
        built.append(kind)
        return Executables(tiers(kind), {})

    def make_mixed(kind: Kind) -> Mapping[TierName, Tier]:
        built.append(f"mixed {kind}")
        return tiers(kind)

    table = TierTable(Executables(tiers("greedy"), {}), make, make_mixed)
    assert (table.draft_lens, table.row_counts) == ((0, 3), (1, 2))
    assert table.prepared("greedy", watched=False) and not table.prepared("greedy", watched=True)
    before = table.tiers
    for _ in range(2):
        table.prepare("sampled", watched=True)
    assert built == ["sampled", "mixed sampled"] and table.mixes("sampled") and not table.mixes("greedy")
    assert len(before) == 4 and len(table.tiers) == 8, "a step that reads the old table is not disturbed"

"""The engine is composed: its parts have typed constructors and do not know it."""

from __future__ import annotations

import gc
import importlib
import inspect
import pkgutil
import weakref
from collections.abc import Iterator
from typing import Protocol

import speccompile
from speccompile import runtime
from speccompile.runtime.engine import Engine
from support.tiny import tiny_llama

PARTS = [
    "loop",
    "scheduler",
    "prompts",
    "choice",
    "table",
    "batch",
    "slots",
    "waiting",
    "policies",
    "adapters",
    "submitter",
    "training",
    "_async_driver",
    "_shutdown",
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

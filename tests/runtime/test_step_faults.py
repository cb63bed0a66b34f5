"""Executables that raise: whom that concerns."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

from speccompile import Speculator
from speccompile.errors import RequestFailed, UnknownTier
from speccompile.runtime.engine import Engine
from speccompile.runtime.policy_controller import Fixed
from speccompile.runtime.request import Request
from support.engines import (
    MAX_BATCH,
    Breaks,
    Fail,
    Make,
    admit_all,
    assert_exact,
    assert_failed,
    assert_usable,
    breaking,
    greedy,
    neighbours,
    prompt,
    threads,
)
from support.errors import assert_error, raises
from support.recorder import Recorder


def first_time() -> Fail:
    left = [True]
    return lambda engine: bool(left and left.pop())


def prefills(request: Request) -> Fail:
    """A chunk of its prompt is being read."""
    return lambda engine: not request.finished and int(engine.arena["prefill_slot"][0]) == request.slot


MEMORY = [MemoryError("no room"), torch.OutOfMemoryError("CUDA out of memory")]


@pytest.mark.parametrize("error", MEMORY, ids=["host", "device"])
@pytest.mark.parametrize("length", [5, 40])
@pytest.mark.parametrize("after", [False, True])
def test_a_prompt_that_finds_no_memory(
    make: Make, model: LlamaForCausalLM, error: Exception, length: int, after: bool
) -> None:
    """``after``: its chunk was computed, but the step did not come to its end. ``length`` 40 is two chunks."""
    engine = make(prefill_budget=64).engine
    others = neighbours(engine, new=60)
    for other in others:
        while not other.new_tokens:
            engine.step()
    request = engine.submit(prompt(length), max_new_tokens=20)
    breaking(engine, engine.prefill_tiers, error, prefills(request), after=after)
    waiting = [engine.submit(prompt(5, seed), max_new_tokens=10) for seed in range(110, 114)]
    engine.run()
    assert_failed(request, type(error), str(error))
    assert request.new_tokens == []
    assert_exact(model, [*others, *waiting])
    assert_usable(engine, model)


@pytest.mark.parametrize("error", MEMORY, ids=["host", "device"])
@pytest.mark.parametrize("what", ["reset_slot", "copy_text_state"])
def test_a_slot_that_cannot_be_written(
    engine: Engine, model: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch, error: Exception, what: str
) -> None:
    running = engine.submit(prompt(20), max_new_tokens=60)
    while not running.new_tokens:
        engine.step()
    failing, write = first_time(), getattr(engine.arena, what)

    def fails_once(*arguments: Any) -> None:
        if failing(engine):
            raise error
        write(*arguments)

    monkeypatch.setattr(engine.arena, what, fails_once)
    # It begins as the running one, whose KV is copied.
    request = engine.submit([*prompt(20), 7, 8], max_new_tokens=20)
    waiting = engine.submit(prompt(5, 1), max_new_tokens=20)
    engine.run()
    assert_failed(request, type(error), str(error))
    assert_exact(model, [running, waiting])
    assert_usable(engine, model)


def test_generate_without_memory_for_one_prompt(make: Make, model: LlamaForCausalLM) -> None:
    """What the caller gets is the error itself, and no row stays."""
    spec = make(prefill_budget=64)
    others = neighbours(spec.engine)
    admitted = [0]

    def second(engine: Engine) -> bool:
        (reader,) = engine.batch.readers
        ours = len(reader.prompt) == 4
        admitted[0] += ours
        return ours and admitted[0] == 2

    error = MemoryError("no room")
    breaking(spec.engine, spec.engine.prefill_tiers, error, second)
    with pytest.raises(MemoryError) as caught:
        spec.generate(torch.tensor([prompt(4, seed) for seed in range(2)]), max_new_tokens=20)
    assert caught.value is error
    spec.engine.run()
    assert_exact(model, others)
    assert_usable(spec.engine, model)


@pytest.mark.parametrize("after", [False, True])
def test_a_tier_that_raises_fails_all_in_it_and_nobody_who_waits(
    engine: Engine, model: LlamaForCausalLM, after: bool
) -> None:
    error = RuntimeError("a kernel failed")
    recorders = [Recorder() for _ in range(MAX_BATCH)]
    running = [engine.submit(prompt(5, seed), max_new_tokens=30, streamer=recorders[seed]) for seed in range(MAX_BATCH)]
    admit_all(engine)
    while any(not request.new_tokens for request in running):
        engine.step()
    waiting = [engine.submit(prompt(5, seed), max_new_tokens=12) for seed in range(10, 16)]
    breaking(engine, engine.tiers, error, first_time(), after=after)
    engine.run()
    for seed, request in enumerate(running):
        assert_failed(request, RuntimeError, "a kernel failed")
        assert request.error is error
        # What came before that is what it would be.
        assert request.new_tokens == greedy(model, prompt(5, seed), len(request.new_tokens)) != []
        assert recorders[seed].received[-1] == "end"
    assert_exact(model, waiting)
    assert_usable(engine, model)


def test_everybody_who_waits_for_a_failed_step_is_told(engine: Engine) -> None:
    requests = [engine.submit(prompt(5, seed), max_new_tokens=30) for seed in range(3)]
    while any(not request.new_tokens for request in requests):
        engine.step()
    breaking(engine, engine.tiers, RuntimeError("a kernel failed"), first_time())
    raised: list[BaseException] = []

    def wait(request: Request) -> None:
        with raises(RequestFailed, reason=re.compile("a kernel failed")) as caught:
            request.result()
        raised.append(caught.value)

    with threads(*[lambda request=request: wait(request) for request in requests]):
        pass
    # Each in its own error, of which one cause is that of all.
    assert len({id(error) for error in raised}) == 3 and len({id(error.__cause__) for error in raised}) == 1


class Policies:
    class Raises:
        def choose(self, live_rows: int) -> int:
            raise LookupError("no schedule for so many rows")

    class Unbuilt:
        def choose(self, live_rows: int) -> int:
            return 2

    class NoNumber:
        def choose(self, live_rows: int) -> Any:
            return None


@pytest.mark.parametrize(
    ("policy", "kind", "fields"),
    [
        (Policies.Raises(), LookupError, {}),
        (Policies.Unbuilt(), UnknownTier, {"tier": 2, "built": "0, 3"}),
        (Policies.NoNumber(), UnknownTier, {"tier": None}),
    ],
)
def test_a_policy_that_cannot_choose(
    make: Make, model: LlamaForCausalLM, policy: Any, kind: type[Exception], fields: dict[str, Any]
) -> None:
    spec = make(policy=policy)
    requests = neighbours(spec.engine)
    spec.engine.run()
    for request in requests:
        assert_failed(request, kind, **fields)
    with pytest.raises(kind) as caught:
        spec.generate(torch.tensor([prompt(5)]), max_new_tokens=20)
    assert_error(caught.value, kind, **fields)
    spec.set_tier(3)
    assert_usable(spec.engine, model)


@pytest.mark.parametrize("where", ["a tier", "a prompt", "the policy"])
def test_an_interrupt_in_a_step_goes_on_to_the_caller_and_leaves_a_usable_engine(
    make: Make, model: LlamaForCausalLM, where: str
) -> None:
    class Interrupts(Fixed):
        def choose(self, live_rows: int) -> int:
            if where == "the policy" and first(engine):
                raise KeyboardInterrupt
            return 3

    first = first_time()
    engine = make(policy=Interrupts(3)).engine
    running = neighbours(engine)
    if where != "a prompt":
        admitted = [engine.submit(prompt(5, seed), max_new_tokens=30) for seed in (103, 104)]
        while where == "a tier" and any(not request.new_tokens for request in [*running, *admitted]):
            engine.step()
        running += admitted
    waiting = [engine.submit(prompt(5, seed), max_new_tokens=10) for seed in range(3)]
    if where == "a tier":
        breaking(engine, engine.tiers, KeyboardInterrupt(), first)
    elif where == "a prompt":
        breaking(engine, engine.prefill_tiers, KeyboardInterrupt(), first)
    with pytest.raises(KeyboardInterrupt):
        engine.run()
    failed = [request for request in running if request.finished]
    assert failed
    for request in failed:
        assert_failed(request, RuntimeError, "interrupted by KeyboardInterrupt")
    engine.run()
    assert_exact(model, [request for request in [*running, *waiting] if request not in failed])
    if where == "a prompt":
        assert failed == running[:1], "no other request was concerned"
    assert_usable(engine, model)


def test_an_interrupt_comes_to_whoever_waits_for_a_result(engine: Engine, model: LlamaForCausalLM) -> None:
    request = engine.submit(prompt(5), max_new_tokens=20)
    breaking(engine, engine.tiers, KeyboardInterrupt(), first_time())
    with pytest.raises(KeyboardInterrupt):
        request.result()
    assert_usable(engine, model)


# --- late results --------------------------------------------------------------------------------


def test_faults_where_results_are_read_a_step_late(make: Make, model: LlamaForCausalLM) -> None:
    """As on a GPU: a step is under way when what went wrong in the one before is seen."""
    spec: Speculator = make()
    engine = spec.engine
    engine.scheduler.late = True
    others = neighbours(engine)
    streamers = [Breaks(2), Breaks(7), Breaks(None)]
    requests = [engine.submit(prompt(5, seed), max_new_tokens=20, streamer=s) for seed, s in enumerate(streamers)]
    heard = Recorder()
    ended = engine.submit(prompt(5, 9), max_new_tokens=6, streamer=heard)
    engine.run()
    assert all(isinstance(request.error, OSError) for request in requests)
    assert_exact(model, [*others, ended])
    assert heard.received.count("end") == 1
    breaking(engine, engine.tiers, RuntimeError("a kernel failed"), first_time())
    failing = neighbours(engine)
    engine.run()
    assert all(isinstance(request.error, RuntimeError) for request in failing)
    assert_usable(engine, model)

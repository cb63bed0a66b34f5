"""Who steps: one thread by hand, several at once, one that serves."""

from __future__ import annotations

import contextlib
import random
import threading
import time
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

from speccompile.errors import Closed, QueueFull
from speccompile.runtime.engine import Engine
from speccompile.runtime.request import Request
from support.engines import PATIENCE, Calls, Make, greedy, prompt, serving, threads
from support.recorder import Recorder


def test_a_step_returns_those_who_had_a_row(engine: Engine) -> None:
    assert engine.step() == []
    request = engine.submit(prompt(4), max_new_tokens=3)
    # With no row to keep waiting, the prompt alone is read.
    assert engine.step() == [] and len(request.new_tokens) == 1
    assert engine.step() == [request] and request.finished
    assert engine.step() == []


def test_run_goes_on_until_nothing_waits_and_nothing_runs(engine: Engine, model: LlamaForCausalLM) -> None:
    assert engine.idle
    engine.run()
    requests = [engine.submit(prompt(3, seed), max_new_tokens=10) for seed in range(9)]
    assert not engine.idle
    engine.run()
    assert engine.idle
    assert [request.new_tokens for request in requests] == [greedy(model, prompt(3, seed), 10) for seed in range(9)]


def test_run_goes_on_with_what_callbacks_submit(engine: Engine, model: LlamaForCausalLM) -> None:
    more: list[Request] = []

    def submit() -> None:
        if len(more) < 3:
            more.append(engine.submit(prompt(4, len(more)), max_new_tokens=5, streamer=Calls(submit, at=6)))

    engine.submit(prompt(3), max_new_tokens=3, streamer=Calls(submit, at=4))
    engine.run()
    assert [request.new_tokens for request in more] == [greedy(model, prompt(4, seed), 5) for seed in range(3)]


@pytest.mark.parametrize("waiting", [0, 1024])
def test_threads_submit_stream_and_cancel_while_another_serves(
    make: Make, model: LlamaForCausalLM, waiting: int
) -> None:
    """Hundreds of requests: nothing is lost, nothing comes twice, and every text is transformers' own."""
    engine = make(max_waiting=waiting).engine
    texts = [(prompt(1 + 3 * seed, seed), greedy(model, prompt(1 + 3 * seed, seed), 30)) for seed in range(20)]
    each, count = 30, 5
    done: list[tuple[Request, list[int], Recorder]] = []

    def submit(arguments: dict[str, Any]) -> Request:
        while True:
            try:
                return engine.submit(**arguments)
            except QueueFull:
                time.sleep(0.001)

    def client(number: int) -> None:
        rng = random.Random(number)
        for _ in range(each):
            text, expected = rng.choice(texts)
            new, heard = rng.randint(1, 12), Recorder()
            arguments = {"ids": text, "max_new_tokens": new, "priority": rng.randint(-1, 1), "streamer": heard}
            kind = rng.choice(["result", "stream", "cancel", "cancel at once", "aside"])
            request = submit(arguments)
            if kind == "result":
                assert request.result().token_ids == expected[:new]
            elif kind == "stream":
                assert list(request.stream()) == expected[:new]
            elif kind == "cancel":
                taken = [token for token, _ in zip(request.stream(), range(rng.randint(1, new)), strict=False)]
                cancelled = request.cancel()
                assert taken == expected[: len(taken)]
                # Its stream was left early, which may have cancelled it already.
                assert request.finish_reason == "cancelled" or not cancelled
            elif kind == "cancel at once":
                request.cancel()
            done.append((request, expected[:new], heard))

    with serving(engine):
        with threads(*[lambda number=number: client(number) for number in range(count)]):
            pass
        for request, _, _ in done:
            while not request.finished:
                time.sleep(0.001)
    assert len(done) == each * count
    for request, expected, heard in done:
        whole = request.finish_reason == "max_new_tokens"
        assert whole or request.finish_reason == "cancelled"
        assert request.new_tokens == expected[: None if whole else len(request.new_tokens)]
        # Its streamer heard the same, once.
        tokens = [[token] for token in request.new_tokens]
        admitted = [] if request.timings.queued is None else [[request.prompt]]
        assert heard.received == [*[(torch.int64, value) for value in [*admitted, *tokens]], "end"]


def test_several_threads_may_step_at_once(
    engine: Engine, model: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    inside: list[int] = []
    most = 0
    run_step = engine.scheduler.run_step

    def counted() -> list[Request]:
        nonlocal most
        inside.append(1)
        most = max(most, len(inside))
        try:
            time.sleep(0.0005)
            return run_step()
        finally:
            inside.pop()

    monkeypatch.setattr(engine.scheduler, "run_step", counted)
    requests = [engine.submit(prompt(5, seed), max_new_tokens=12, streamer=Recorder()) for seed in range(12)]

    def step() -> None:
        while not all(request.finished for request in requests):
            engine.step()

    with threads(step, step, step, engine.run):
        pass
    assert most == 1, "one thread at a time steps"
    assert [request.new_tokens for request in requests] == [greedy(model, prompt(5, seed), 12) for seed in range(12)]


def test_two_threads_may_serve(engine: Engine, model: LlamaForCausalLM) -> None:
    with threads(engine.serve), serving(engine):
        requests = [engine.submit(prompt(5, seed), max_new_tokens=12) for seed in range(12)]
        texts = [request.result(PATIENCE).token_ids for request in requests]
    assert texts == [greedy(model, prompt(5, seed), 12) for seed in range(12)]


def test_serving_sleeps_until_somebody_comes(engine: Engine, model: LlamaForCausalLM) -> None:
    steps: list[float] = []
    run_step = engine.scheduler.run_step

    def counted() -> list[Request]:
        steps.append(time.monotonic())
        return run_step()

    engine.scheduler.run_step = counted  # type: ignore[method-assign]
    with serving(engine):
        while not steps:
            time.sleep(0.001)
        time.sleep(0.05)
        # One look at the empty queue, and no more.
        assert len(steps) == 1
        assert engine.submit(prompt(5), max_new_tokens=5).result(PATIENCE).token_ids == greedy(model, prompt(5), 5)


# --- whose workers -------------------------------------------------------------------------------


@pytest.fixture
def released(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Threads that let go of their workers, in that order."""
    idents: list[int] = []
    monkeypatch.setattr("speccompile.runtime.engine_loop.release_workers", lambda: idents.append(threading.get_ident()))
    return idents


def test_workers_are_kept_from_step_to_step_and_let_go_of_when_nothing_is_left(
    engine: Engine, released: list[int]
) -> None:
    request = engine.submit(prompt(4), max_new_tokens=30)
    # The first request makes the mixed tiers, in a turn.
    released.clear()
    while not request.finished:
        assert not released
        engine.step()
    assert released == [threading.get_ident()]


def test_workers_are_let_go_of_when_another_thread_waits_for_its_turn(
    engine: Engine, released: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    request = engine.submit(prompt(4), max_new_tokens=30)
    engine.step()
    released.clear()
    waiting = threading.Thread(target=lambda: request.result(PATIENCE), daemon=True)
    run_step = engine.scheduler.run_step

    def while_another_waits() -> list[Request]:
        monkeypatch.setattr(engine.scheduler, "run_step", run_step)
        waiting.start()
        while not engine.loop._waiting_threads:
            time.sleep(0.001)
        assert not released
        return run_step()

    monkeypatch.setattr(engine.scheduler, "run_step", while_another_waits)
    engine.step()
    assert released[0] == threading.get_ident()
    waiting.join(PATIENCE)
    assert request.finished and not engine.loop._waiting_threads


def test_nobody_takes_turns_from_a_thread_that_serves(engine: Engine, model: LlamaForCausalLM) -> None:
    stepping: set[int] = set()
    run_step = engine.scheduler.run_step

    def noted() -> list[Request]:
        stepping.add(threading.get_ident())
        return run_step()

    engine.scheduler.run_step = noted  # type: ignore[method-assign]
    with serving(engine):
        while not stepping:
            time.sleep(0.001)
        for seed in range(6):
            assert engine.submit(prompt(5, seed), max_new_tokens=9).result(PATIENCE).token_ids == greedy(
                model, prompt(5, seed), 9
            )
    assert len(stepping) == 1 and threading.get_ident() not in stepping
    with pytest.raises(Closed):
        engine.step()


def test_who_waits_goes_on_alone_when_the_thread_that_serves_dies(engine: Engine, model: LlamaForCausalLM) -> None:
    class Dies(Recorder):
        def put(self, value: torch.Tensor) -> None:
            super().put(value)
            if len(self.received) == 3:
                raise SystemExit

    def serve() -> None:
        with contextlib.suppress(SystemExit):
            engine.serve()

    with threads(serve):
        while not engine.loop._servers:
            time.sleep(0.001)
        request = engine.submit(prompt(5, 1), max_new_tokens=60)
        engine.submit(prompt(5, 2), max_new_tokens=60, streamer=Dies())
        assert request.result(PATIENCE).token_ids == greedy(model, prompt(5, 1), 60)
    assert not engine.loop._servers


@pytest.mark.parametrize("wait", ["result", "stream", "run"])
def test_what_ends_between_two_looks_of_a_waiter_does_not_keep_it_waiting(engine: Engine, wait: str) -> None:
    """The thread that serves goes to sleep after the last turn, so nothing else would wake it."""
    held = threading.Event()
    refuse = engine.loop.refuse_callback

    def slow(what: str) -> None:
        if threading.current_thread().name == "waiter" and not held.is_set():
            held.set()
            while not (request.finished and engine.idle):
                time.sleep(0.001)
            time.sleep(0.05)
        refuse(what)

    engine.loop.refuse_callback = slow  # type: ignore[method-assign]
    with serving(engine):
        request = engine.submit(prompt(5), max_new_tokens=30)
        waits = {"result": request.result, "stream": lambda: list(request), "run": engine.run}
        waiter = threading.Thread(target=waits[wait], name="waiter", daemon=True)
        waiter.start()
        waiter.join(10)
        assert held.is_set() and not waiter.is_alive()

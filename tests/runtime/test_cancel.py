"""Cancelling a request: whatever it is at, from any thread, once."""

from __future__ import annotations

import threading

from transformers import LlamaForCausalLM

from speccompile.runtime.engine import Engine
from support.engines import MAX_BATCH, PATIENCE, Calls, Gate, Make, admit_all, greedy, prompt, read, run_async, threads


def test_cancelling_one_that_waits(make: Make, model: LlamaForCausalLM) -> None:
    engine = make(max_waiting=1).engine
    running = [engine.submit(prompt(5, seed), max_new_tokens=30) for seed in range(MAX_BATCH)]
    admit_all(engine)
    request = engine.submit(prompt(5, 9), max_new_tokens=5)
    assert engine.capacity().free_waiting == 0
    assert request.cancel() is True
    assert request.finished and request.slot == -1 and request.new_tokens == []
    # Its place is free at once.
    assert engine.capacity().free_waiting == 1
    engine.run()
    assert request.new_tokens == [] and request.timings.queued is None
    assert [other.new_tokens for other in running] == [greedy(model, prompt(5, seed), 30) for seed in range(4)]


def test_cancelling_one_that_runs(engine: Engine, model: LlamaForCausalLM) -> None:
    request, other = (engine.submit(prompt(4, seed), max_new_tokens=40) for seed in range(2))
    while len(request.new_tokens) < 5:
        engine.step()
    count = len(request.new_tokens)
    assert request.cancel() is True
    assert request.finish_reason == "cancelled"
    # The slot is free at once, and steps go on without it.
    assert engine.running == [other] and engine.step() == [other]
    assert other.result().token_ids == greedy(model, prompt(4, 1), 40)
    assert request.new_tokens == greedy(model, prompt(4), count)
    assert request.result().token_ids == request.new_tokens and request.result().finish_reason == "cancelled"


def test_one_that_is_cancelled_in_a_step_is_counted_once(make: Make) -> None:
    spec = make()
    engine = spec.engine
    requests = [engine.submit(prompt(5, seed), max_new_tokens=40) for seed in range(MAX_BATCH)]
    admit_all(engine)
    spec.stats.reset()
    # The one that hears it and one beside it, both rows of the step that is on.
    hears = Calls(lambda: [caller.cancel(), requests[0].cancel()], at=3)
    requests[-1].cancel()
    caller = engine.submit(prompt(5, 9), max_new_tokens=40, streamer=hears)
    engine.run()
    assert caller.finish_reason == requests[0].finish_reason == "cancelled"
    assert spec.stats.ended_requests == MAX_BATCH + 1


def test_cancelling_from_another_thread_ends_it_there(engine: Engine, model: LlamaForCausalLM) -> None:
    """In the middle of a step, while the owner waits for the result: no token comes after it."""
    reached, cancelled = threading.Event(), threading.Event()

    def hold() -> None:
        reached.set()
        assert cancelled.wait(PATIENCE)

    recorder = Calls(hold, at=3)
    request = engine.submit(prompt(5), max_new_tokens=40, streamer=recorder)
    other = engine.submit(prompt(5, 1), max_new_tokens=40)
    counts: list[int] = []

    def cancel() -> None:
        assert reached.wait(PATIENCE)
        assert request.cancel() is True
        counts.append(len(request.new_tokens))
        assert request.finish_reason == "cancelled", "not only at the end of the step"
        cancelled.set()

    with threads(cancel):
        result = request.result()
    # The step had emitted four tokens, and the second one was being handed out.
    assert result.finish_reason == "cancelled" and counts == [2]
    assert result.token_ids == request.new_tokens == greedy(model, prompt(5), 2)
    assert recorder.received.count("end") == 1 and len(recorder.received) == 1 + 2 + 1
    assert other.result().token_ids == greedy(model, prompt(5, 1), 40)


def test_readers_wake_when_another_thread_cancels(make: Make, model: LlamaForCausalLM) -> None:
    gate = Gate()
    engine = make(policy=gate).engine
    request = engine.submit(prompt(5), max_new_tokens=40)
    got: list[list[int]] = []
    readers = [
        lambda: got.append(list(request)),
        lambda: got.append(request.result().token_ids),
        lambda: got.append(run_async(read(request))),
    ]
    with threads(*readers):
        assert gate.reached.wait(PATIENCE)
        request.cancel()
        gate.open()
    assert got == [greedy(model, prompt(5), 1)] * 3


def test_threads_that_cancel_at_once_agree(engine: Engine) -> None:
    requests = [engine.submit(prompt(5, seed), max_new_tokens=40) for seed in range(6)]
    engine.step()
    answers: list[list[bool]] = []
    together = threading.Barrier(4)

    def cancel() -> None:
        together.wait(PATIENCE)
        answers.append([request.cancel() for request in requests])

    with threads(*[cancel] * 4):
        pass
    assert [sum(column) for column in zip(*answers, strict=True)] == [1] * 6
    assert engine.idle

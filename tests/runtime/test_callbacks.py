"""What may be done inside of a callback, and what may not."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

from speccompile import Speculator
from speccompile.errors import (
    Closed,
    InsideStep,
    RequestFailed,
)
from speccompile.runtime.engine import Engine
from speccompile.runtime.request import Request
from support.engines import MAX_BATCH, Calls, Make, admit_all, greedy, prompt
from support.errors import raises
from support.recorder import Recorder

WAITS: dict[str, Callable[[Speculator, Request], Any]] = {
    "step": lambda spec, other: spec.engine.step(),
    "run": lambda spec, other: spec.engine.run(),
    "serve": lambda spec, other: spec.engine.serve(),
    "result": lambda spec, other: other.result(),
    "result in time": lambda spec, other: other.result(timeout=1),
    "stream": lambda spec, other: list(other.stream()),
    "generate": lambda spec, other: spec.generate(torch.tensor([[1, 2]]), max_new_tokens=2),
    "check": lambda spec, other: spec.check([[1, 2]]),
    "async": lambda spec, other: asyncio.run(asyncio.wait_for(read_all(other), 5)),
}


async def read_all(request: Request) -> list[int]:
    return [token async for token in request]


@pytest.mark.parametrize("wait", WAITS)
@pytest.mark.parametrize("at", [1, 2, 4])
def test_waiting_in_a_callback_fails_that_request_alone(
    make: Make, model: LlamaForCausalLM, wait: str, at: int
) -> None:
    """It would wait for the step that it is part of. ``at`` 1 is at admission, 2 after prefill, 4 after a tier."""
    spec = make()
    # Far back, so that it is not over when the callback waits for it.
    other = spec.engine.submit(prompt(4, 1), max_new_tokens=30, priority=-1)
    bad = spec.engine.submit(prompt(3), max_new_tokens=20, streamer=Calls(lambda: WAITS[wait](spec, other), at))
    spec.engine.run()
    with raises(RequestFailed, reason=re.compile("InsideStep")) as caught:
        bad.result()
    assert isinstance(caught.value.__cause__, InsideStep) and caught.value.__cause__ is bad.error
    assert bad.finish_reason == "error" and len(bad.new_tokens) == at - 1
    # An async reader that was left before the end cancels what it read.
    assert other.finish_reason == ("cancelled" if wait == "async" else "max_new_tokens")
    assert other.new_tokens == greedy(model, prompt(4, 1), 30)[: len(other.new_tokens)]


def test_waiting_in_a_criterion_is_refused_too(engine: Engine, model: LlamaForCausalLM) -> None:
    other = engine.submit(prompt(4, 1), max_new_tokens=30, priority=-1)
    bad = engine.submit(prompt(3), max_new_tokens=20, stopping_criteria=lambda ids, scores: other.result())
    engine.run()
    assert isinstance(bad.error, InsideStep)
    assert other.new_tokens == greedy(model, prompt(4, 1), 30)


def test_a_callback_that_handles_the_refusal_goes_on(engine: Engine, model: LlamaForCausalLM) -> None:
    other = engine.submit(prompt(4, 1), max_new_tokens=10)

    def wait() -> None:
        with raises(InsideStep, what=re.compile(r"step\(\)")):
            engine.step()
        with raises(InsideStep, what="waiting for a request"):
            other.result()

    request = engine.submit(prompt(3), max_new_tokens=20, streamer=Calls(wait))
    assert request.result().token_ids == greedy(model, prompt(3), 20)
    # In the next step the same thread may wait again.
    assert other.result().token_ids == greedy(model, prompt(4, 1), 10)


def test_a_callback_may_look_at_what_has_ended(engine: Engine) -> None:
    over = engine.submit(prompt(4, 1), max_new_tokens=3)
    over.result()
    seen: list[list[int]] = []

    def look() -> None:
        seen.append(over.result().token_ids)
        seen.append(list(over))

    engine.submit(prompt(3), max_new_tokens=3, streamer=Calls(look)).result()
    assert seen == [over.new_tokens] * 2


def test_a_callback_may_read_what_has_come(engine: Engine, model: LlamaForCausalLM) -> None:
    """Its own request's tokens so far are there; only after them it would have to wait."""
    got: list[int] = []

    def read() -> None:
        with pytest.raises(InsideStep):
            for token in request:
                got.append(token)

    request = engine.submit(prompt(3), max_new_tokens=9, streamer=Calls(read, at=4))
    assert request.result().token_ids == greedy(model, prompt(3), 9)
    assert got == greedy(model, prompt(3), 3)


@pytest.mark.parametrize("at", [1, 2, 4])
def test_a_callback_may_submit(engine: Engine, model: LlamaForCausalLM, at: int) -> None:
    more: list[Request] = []
    first = engine.submit(
        prompt(3),
        max_new_tokens=9,
        streamer=Calls(lambda: more.append(engine.submit(prompt(4, 1), max_new_tokens=8)), at),
    )
    engine.run()
    assert first.new_tokens == greedy(model, prompt(3), 9)
    assert [request.new_tokens for request in more] == [greedy(model, prompt(4, 1), 8)]


@pytest.mark.parametrize("at", [1, 2, 4])
@pytest.mark.parametrize("whom", ["itself", "one that runs", "one that waits", "one that ended"])
def test_a_callback_may_cancel(engine: Engine, model: LlamaForCausalLM, whom: str, at: int) -> None:
    ended = engine.submit([5], max_new_tokens=1)
    ended.result()
    runs = engine.submit(prompt(4, 1), max_new_tokens=60, streamer=(heard := Recorder()))
    while not runs.new_tokens:
        engine.step()
    answers: list[bool] = []
    streamer = Calls(lambda: answers.append(found[whom].cancel()), at)
    itself = engine.submit(prompt(3), max_new_tokens=20, streamer=streamer)
    filler = [engine.submit(prompt(5, 2), max_new_tokens=5) for _ in range(MAX_BATCH)]
    waits = engine.submit(prompt(4, 3), max_new_tokens=5, priority=-1)
    found = {"itself": itself, "one that runs": runs, "one that waits": waits, "one that ended": ended}
    engine.run()
    assert answers == [whom != "one that ended"]
    for name, request in found.items():
        if name == whom and name != "one that ended":
            assert request.finish_reason == "cancelled"
            assert request.new_tokens == greedy(model, request.prompt, 60)[: len(request.new_tokens)]
        else:
            assert request.new_tokens == greedy(model, request.prompt, request.params.max_new_tokens), name
    if whom == "itself":
        assert len(itself.new_tokens) == at - 1
    if whom == "one that waits":
        assert waits.new_tokens == [] and waits.timings.queued is None
    # The end of a text is said once, who ever ends it.
    assert heard.received.count("end") == streamer.received.count("end") == 1
    assert [request.new_tokens for request in filler] == [greedy(model, prompt(5, 2), 5)] * MAX_BATCH


@pytest.mark.parametrize("at", [1, 2, 4])
def test_a_callback_may_close(engine: Engine, at: int) -> None:
    requests = [engine.submit(prompt(3, seed), max_new_tokens=50, priority=-1) for seed in range(1, 7)]
    streamer = Calls(engine.close, at)
    requests.append(engine.submit(prompt(3), max_new_tokens=50, streamer=streamer))
    engine.run()
    assert [request.finish_reason for request in requests] == ["cancelled"] * 7
    assert streamer.received[-1] == "end" and streamer.received.count("end") == 1
    with pytest.raises(Closed):
        engine.submit([1])


@pytest.mark.parametrize("of", ["a request that is cancelled", "a request that comes to its end"])
def test_the_end_of_a_streamer_may_close(engine: Engine, of: str) -> None:
    """``cancel`` outside of a step ends the streamer, too: no reader may be left waiting."""

    class Closes(Recorder):
        def end(self) -> None:
            super().end()
            engine.close()

    others = [engine.submit(prompt(3, seed), max_new_tokens=50) for seed in range(1, 7)]
    new = 50 if of == "a request that is cancelled" else 3
    request = engine.submit(prompt(3), max_new_tokens=new, streamer=Closes(), priority=1)
    if of == "a request that is cancelled":
        admit_all(engine)
        request.cancel()
    else:
        engine.run()
    assert [other.finish_reason for other in others] == ["cancelled"] * 6
    assert engine.capacity().free_slots == MAX_BATCH and engine.capacity().waiting == 0

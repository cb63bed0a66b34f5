"""Callbacks that raise, and wishes to stop everything: whom they concern."""

from __future__ import annotations

import asyncio
import re
import threading
import time
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

from speccompile.errors import RequestFailed
from speccompile.runtime.engine import Engine
from speccompile.runtime.request import Request
from support.engines import (
    MAX_BATCH,
    PATIENCE,
    Breaks,
    Make,
    assert_exact,
    assert_failed,
    assert_usable,
    greedy,
    neighbours,
    prompt,
    threads,
)
from support.errors import raises
from support.recorder import Recorder

# --- callbacks that raise ------------------------------------------------------------------------


# The prompt is put at admission, the first token after prefill, the others after steps of four tokens.
@pytest.mark.parametrize("at", [1, 2, 3, 5, 6, 9, 21])
def test_a_streamer_that_raises(engine: Engine, model: LlamaForCausalLM, at: int) -> None:
    others = neighbours(engine)
    streamer = Breaks(at)
    request = engine.submit(prompt(5), max_new_tokens=20, streamer=streamer)
    engine.run()
    assert_failed(request, OSError, "the pipe is closed")
    # The token it could not put is the request's last.
    assert request.new_tokens == greedy(model, prompt(5), 20)[: at - 1]
    assert len(streamer.received) == at, "it is not called again, not for the end either"
    assert_exact(model, others)
    assert_usable(engine, model)


def test_a_streamer_that_raises_at_the_end(engine: Engine, model: LlamaForCausalLM) -> None:
    others = neighbours(engine)
    request = engine.submit(prompt(5), max_new_tokens=20, streamer=Breaks(None))
    engine.run()
    assert_failed(request, OSError, "the pipe is closed")
    assert request.new_tokens == greedy(model, prompt(5), 20)
    assert_exact(model, others)
    assert_usable(engine, model)


def test_a_streamer_that_raises_when_its_request_is_cancelled(engine: Engine, model: LlamaForCausalLM) -> None:
    others = neighbours(engine)
    request = engine.submit(prompt(5), max_new_tokens=50, streamer=Breaks(None))
    while not request.new_tokens:
        engine.step()
    request.cancel()
    assert_failed(request, OSError)
    engine.run()
    assert_exact(model, others)
    assert_usable(engine, model)


def test_more_streamers_raise_than_there_are_slots(engine: Engine, model: LlamaForCausalLM) -> None:
    requests = [
        engine.submit(prompt(5, seed), max_new_tokens=20, streamer=Breaks([1, 2, 7, None][seed % 4]))
        for seed in range(3 * MAX_BATCH)
    ]
    engine.run()
    assert all(isinstance(request.error, OSError) for request in requests)
    assert_usable(engine, model)


@pytest.mark.parametrize("at", [1, 2, 5, 6])
def test_a_criterion_that_raises(engine: Engine, model: LlamaForCausalLM, at: int) -> None:
    def broken(ids: torch.Tensor, scores: None) -> torch.Tensor:
        if ids.shape[1] == 5 + at:
            raise TypeError("scores is None")
        return torch.tensor([False])

    others, streamer = neighbours(engine), Recorder()
    request = engine.submit(prompt(5), max_new_tokens=20, stopping_criteria=broken, streamer=streamer)
    engine.run()
    assert_failed(request, TypeError, "scores is None")
    assert request.new_tokens == greedy(model, prompt(5), at)
    # The streamer did nothing wrong: it receives the end, or its reader would wait for ever.
    assert len(streamer.received) == 1 + at + 1 and streamer.received[-1] == "end"
    assert_exact(model, others)
    assert_usable(engine, model)


def test_a_criterion_that_answers_nonsense(engine: Engine, model: LlamaForCausalLM) -> None:
    others = neighbours(engine)
    request = engine.submit(prompt(5), max_new_tokens=20, stopping_criteria=lambda ids, scores: "yes")
    engine.run()
    assert request.finish_reason == "error" and len(request.new_tokens) == 1
    assert_exact(model, others)
    assert_usable(engine, model)


def test_generate_raises_what_its_streamer_raised(make: Make, model: LlamaForCausalLM) -> None:
    spec = make()
    for at in (1, 2, 6, None):
        error = OSError("the pipe is closed")
        with pytest.raises(OSError) as caught:
            spec.generate(torch.tensor([prompt(5)]), max_new_tokens=20, streamer=Breaks(at, error))
        assert caught.value is error
        assert spec.engine.idle
    assert_usable(spec.engine, model)


def test_async_readers_are_told_of_the_error(engine: Engine, model: LlamaForCausalLM) -> None:
    request = engine.submit(prompt(5), max_new_tokens=20, streamer=Breaks(6))
    (other,) = others = neighbours(engine)[:1]

    async def main() -> tuple[list[int], list[int]]:
        got: list[int] = []

        async def read() -> None:
            with raises(RequestFailed, reason=re.compile("the pipe is closed")):
                async for token in request:
                    got.append(token)

        async def read_other() -> list[int]:
            return [token async for token in other]

        _, text = await asyncio.wait_for(asyncio.gather(read(), read_other()), PATIENCE / 2)
        return got, text

    got, text = asyncio.run(main())
    assert got == greedy(model, prompt(5), 5)
    assert text == greedy(model, other.prompt, 30)
    engine.run()
    assert_exact(model, others)


# --- interrupts ----------------------------------------------------------------------------------


# Not after its last token: the end is what comes then.
@pytest.mark.parametrize("at", [1, 2, 3, 6, None])
@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit])
def test_an_interrupt_in_a_callback_goes_on_to_whoever_steps(
    engine: Engine, model: LlamaForCausalLM, at: int | None, kind: type[BaseException]
) -> None:
    """Ctrl-C while a streamer prints, say. The neighbours' tokens of that step are not lost."""
    error = kind("stop")
    before, request, after = (
        engine.submit(prompt(5, 101), max_new_tokens=30),
        engine.submit(prompt(5), max_new_tokens=20, streamer=Breaks(at, error)),
        engine.submit(prompt(5, 102), max_new_tokens=30),
    )
    with pytest.raises(kind) as caught:
        engine.run()
    assert caught.value is error
    # Once.
    engine.run()
    assert_failed(request, RuntimeError, f"interrupted by {kind.__name__}")
    assert_exact(model, [before, after])
    assert_usable(engine, model)


def test_an_interrupt_in_generate(make: Make, model: LlamaForCausalLM) -> None:
    spec = make()
    others = neighbours(spec.engine)
    with pytest.raises(KeyboardInterrupt):
        spec.generate(torch.tensor([prompt(5)]), max_new_tokens=20, streamer=Breaks(6, KeyboardInterrupt()))
    # Its rows are not wanted any more; other requests go on.
    assert set(spec.engine.running) | {other for other in others if other.finished} == set(others)
    spec.engine.run()
    assert_exact(model, others)
    assert_usable(spec.engine, model)


def test_an_interrupt_while_cancelling(engine: Engine, model: LlamaForCausalLM) -> None:
    others = neighbours(engine)
    request = engine.submit(prompt(5), max_new_tokens=50, streamer=Breaks(None, KeyboardInterrupt("stop")))
    while not request.new_tokens:
        engine.step()
    with pytest.raises(KeyboardInterrupt):
        request.cancel()
    engine.run()
    assert_exact(model, others)
    assert_usable(engine, model)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit])
def test_an_interrupt_in_the_thread_that_drives_leaves_no_async_reader_waiting(
    engine: Engine, model: LlamaForCausalLM, kind: type[BaseException]
) -> None:
    request = engine.submit(prompt(5), max_new_tokens=20, streamer=Breaks(3, kind("stop")))
    others = neighbours(engine)

    async def read(of: Request) -> list[int]:
        return [token async for token in of]

    async def main() -> list[Any]:
        readers = asyncio.gather(*[read(of) for of in (request, *others)], return_exceptions=True)
        return await asyncio.wait_for(readers, PATIENCE / 2)

    failed, *texts = asyncio.run(main())
    assert isinstance(failed, RequestFailed)
    assert texts == [greedy(model, other.prompt, 30) for other in others]


def test_an_interrupt_in_the_thread_that_serves_leaves_nobody_waiting(engine: Engine, model: LlamaForCausalLM) -> None:
    """It serves no more; the waiting callers step then."""

    def serve() -> None:
        with pytest.raises(SystemExit):
            engine.serve()

    reached = threading.Event()

    class Exits(Breaks):
        def put(self, value: torch.Tensor) -> None:
            # Not before everybody waits, or is about to.
            assert len(self.received) < 2 or reached.wait(PATIENCE)
            super().put(value)

    request = engine.submit(prompt(5), max_new_tokens=20, streamer=Exits(3, SystemExit()))
    others = neighbours(engine)
    got: list[tuple[list[int], list[int]]] = []

    def wait(other: Request) -> None:
        reached.set()
        got.append((other.prompt, other.result(PATIENCE).token_ids))

    with threads(serve):
        # The serving thread alone steps until its callback asks it to exit.
        while not request.new_tokens:
            time.sleep(0.001)
        with threads(*[lambda other=other: wait(other) for other in others]):
            pass
    assert sorted(got) == sorted((other.prompt, greedy(model, other.prompt, 30)) for other in others)
    assert isinstance(request.error, RuntimeError)

"""Readers that do not read on: what becomes of their requests."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable, Iterable
from typing import Any

import pytest
from transformers import LlamaForCausalLM

from speccompile.runtime.engine import Engine
from speccompile.runtime.request import Request
from support.engines import MAX_BATCH, Gate, Make, greedy, prompt, read, run_async


@pytest.mark.parametrize("of", [lambda request: request, lambda request: request.stream()])
def test_leaving_a_plain_for_cancels(
    engine: Engine, model: LlamaForCausalLM, of: Callable[[Request], Iterable[int]]
) -> None:
    request = engine.submit(prompt(5), max_new_tokens=60)
    for _ in of(request):
        break
    assert request.finish_reason == "cancelled"
    result = request.result()
    assert result.finish_reason == "cancelled"
    assert 0 < len(result.token_ids) < 60
    assert result.token_ids == greedy(model, prompt(5), 60)[: len(result.token_ids)]
    assert engine.capacity().free_slots == MAX_BATCH and engine.idle


def test_leaving_by_an_exception_cancels(engine: Engine) -> None:
    request = engine.submit(prompt(5), max_new_tokens=60)
    with pytest.raises(KeyError):
        for _ in request:
            raise KeyError
    assert request.finish_reason == "cancelled"


def test_streams_that_are_garbage_collected_cancel(engine: Engine) -> None:
    """One that was begun, and one of a request that waits for a slot."""
    running = [engine.submit(prompt(4), max_new_tokens=60) for _ in range(MAX_BATCH)]
    streams = [iter(request) for request in running]
    for stream in streams:
        next(stream)
    waits = engine.submit(prompt(5), max_new_tokens=60)
    assert engine.capacity().waiting == 1
    # A circle, which only the collector finds.
    kept: list[Any] = [waits.stream(), streams.pop(0)]
    kept.append(kept)
    del kept
    gc.collect()
    assert waits.finish_reason == running[0].finish_reason == "cancelled"
    assert not running[-1].finished
    assert engine.capacity().waiting == 0 and engine.capacity().free_slots == 1
    del stream, streams
    assert engine.capacity().free_slots == MAX_BATCH and engine.idle


def test_a_stream_that_goes_under_its_requests_lock_waits_for_nothing(engine: Engine) -> None:
    """A collector may run anywhere, so also in the middle of what is done to the request."""
    request = engine.submit(prompt(5), max_new_tokens=60)
    with request._lock:
        request.stream()
    assert not request.finished
    engine.step()
    assert request.finish_reason == "cancelled"


def test_a_request_goes_on_while_another_stream_is_read(engine: Engine, model: LlamaForCausalLM) -> None:
    request = engine.submit(prompt(5), max_new_tokens=15)
    reads = iter(request)
    next(reads)
    for _ in request:
        break
    request.stream()
    assert not request.finished
    assert len(list(reads)) == 14
    assert request.result().token_ids == greedy(model, prompt(5), 15)


def test_leaving_an_async_for_cancels(engine: Engine) -> None:
    """The reader does not read on."""

    async def main() -> Request:
        request = engine.submit(prompt(5), max_new_tokens=60)
        async for _ in request:
            break
        # The loop closes what was left at its next turn.
        for _ in range(3):
            await asyncio.sleep(0)
        return request

    request = run_async(main())
    assert request.finish_reason == "cancelled"
    engine.run()
    assert engine.capacity().free_slots == MAX_BATCH


def test_a_loop_that_ends_cancels_what_was_left(engine: Engine) -> None:
    """``asyncio.run`` closes generators that are still held."""
    held: list[Any] = []

    async def main() -> Request:
        request = engine.submit(prompt(5), max_new_tokens=60)
        held.append(aiter(request))
        await anext(held[0])
        return request

    assert run_async(main()).finish_reason == "cancelled"


def test_a_cancelled_task_cancels_its_request_alone(make: Make, model: LlamaForCausalLM) -> None:
    gate = Gate()
    engine = make(policy=gate).engine

    async def main() -> tuple[Request, list[list[int]]]:
        request = engine.submit(prompt(5), max_new_tokens=60)
        others = [engine.submit(prompt(5, seed), max_new_tokens=20) for seed in range(1, 8)]
        first = asyncio.Event()

        async def read_first() -> None:
            async for _ in request:
                first.set()

        task = asyncio.create_task(read_first())
        readers = [asyncio.create_task(read(other)) for other in others]
        await first.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        # In the middle of a step, which the driver's thread does not get on with.
        assert request.finish_reason == "cancelled"
        gate.open()
        return request, await asyncio.gather(*readers)

    request, texts = run_async(main())
    assert request.new_tokens == greedy(model, prompt(5), 1)
    assert texts == [greedy(model, prompt(5, seed), 20) for seed in range(1, 8)]


def test_a_reader_in_time_may_give_up(make: Make, model: LlamaForCausalLM) -> None:
    """``asyncio.timeout`` cancels the reader, which cancels the request."""
    gate = Gate()
    engine = make(policy=gate).engine

    async def main() -> Request:
        request = engine.submit(prompt(5), max_new_tokens=60)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await read(request)
        gate.open()
        return request

    assert run_async(main()).finish_reason == "cancelled"


def test_an_error_in_the_body_cancels(engine: Engine) -> None:
    async def main() -> Request:
        request = engine.submit(prompt(5), max_new_tokens=60)
        with pytest.raises(ZeroDivisionError):
            async for _ in request:
                _ = 1 // 0
        for _ in range(3):
            await asyncio.sleep(0)
        return request

    assert run_async(main()).finish_reason == "cancelled"

"""Many readers at once: event loops, threads, and what drives the engine for them."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

from transformers import LlamaForCausalLM

from speccompile.runtime.engine import Engine
from support.engines import PATIENCE, Calls, Gate, Make, UntilClosed, greedy, prompt, read, run_async, serving, threads


async def read_many(engine: Engine, seeds: range, new: int) -> list[list[int]]:
    requests = [engine.submit(prompt(1 + seed % 9, seed), max_new_tokens=new) for seed in seeds]
    return await asyncio.gather(*[read(request) for request in requests])


def texts(model: LlamaForCausalLM, seeds: range, new: int) -> list[list[int]]:
    return [greedy(model, prompt(1 + seed % 9, seed), new) for seed in seeds]


def test_a_hundred_async_readers_with_no_other_thread(engine: Engine, model: LlamaForCausalLM) -> None:
    assert run_async(read_many(engine, range(100), 8)) == texts(model, range(100), 8)
    assert engine.idle


def test_a_hundred_async_readers_while_a_thread_serves(engine: Engine, model: LlamaForCausalLM) -> None:
    with serving(engine):
        assert run_async(read_many(engine, range(100), 8)) == texts(model, range(100), 8)


def test_the_thread_that_drives_for_async_readers_goes_when_they_have_gone(
    engine: Engine, model: LlamaForCausalLM
) -> None:
    for round_ in range(3):
        assert run_async(read_many(engine, range(3), 5)) == texts(model, range(3), 5), round_
        for thread in threading.enumerate():
            if thread.name == "speccompile-driver":
                thread.join(PATIENCE)
                assert not thread.is_alive()


def test_the_event_loop_is_free_while_the_engine_steps(make: Make) -> None:
    gate = Gate()
    engine = make(policy=gate).engine

    async def main() -> None:
        reader = asyncio.create_task(read(engine.submit(prompt(5), max_new_tokens=5)))
        # Only this task opens the gate that the step waits at, and it runs in the loop of the reader.
        while not gate.reached.is_set():
            await asyncio.sleep(0.001)
        gate.open()
        await reader

    run_async(main())


def test_two_event_loops_in_two_threads(engine: Engine, model: LlamaForCausalLM) -> None:
    got: dict[int, list[list[int]]] = {}

    def loop(start: int) -> None:
        got[start] = run_async(read_many(engine, range(start, start + 15), 8))

    with threads(lambda: loop(0), lambda: loop(100)):
        pass
    assert got == {start: texts(model, range(start, start + 15), 8) for start in (0, 100)}


def test_async_readers_and_waiting_threads_together(engine: Engine, model: LlamaForCausalLM) -> None:
    got: dict[str, Any] = {}

    def wait() -> None:
        requests = [engine.submit(prompt(5, seed), max_new_tokens=12) for seed in range(200, 212)]
        got["sync"] = [request.result().token_ids for request in requests]

    def loop() -> None:
        got["async"] = run_async(read_many(engine, range(20), 8))

    with threads(wait, loop):
        pass
    assert got["async"] == texts(model, range(20), 8)
    assert got["sync"] == [greedy(model, prompt(5, seed), 12) for seed in range(200, 212)]


def test_a_loop_closed_under_its_reader(engine: Engine, model: LlamaForCausalLM) -> None:
    """Nothing can wake the reader any more, so its request is cancelled, and no other request notices."""
    reached, closed = threading.Event(), threading.Event()

    def hold() -> None:
        reached.set()
        assert closed.wait(PATIENCE)

    # Held in the first decode step, when the reader has the first token.
    request = engine.submit(prompt(5), max_new_tokens=60, streamer=Calls(hold, at=3))
    other = engine.submit(prompt(5, 1), max_new_tokens=20)
    loop = asyncio.new_event_loop()
    first = asyncio.Event()

    async def read_on() -> None:
        async for _ in request:
            first.set()

    task = loop.create_task(read_on())
    loop.run_until_complete(asyncio.wait_for(first.wait(), PATIENCE))
    assert reached.wait(PATIENCE)
    loop.close()
    # asyncio would log that it is still there.
    task._log_destroy_pending = False  # type: ignore[attr-defined]
    closed.set()
    assert other.result().token_ids == greedy(model, prompt(5, 1), 20)
    engine.run()
    assert request.finish_reason == "cancelled"
    assert request.new_tokens == greedy(model, prompt(5), 60)[: len(request.new_tokens)]


def test_async_readers_are_told_when_the_engine_is_closed(engine: Engine) -> None:
    held = UntilClosed(engine)

    async def main() -> list[list[int]]:
        requests = [engine.submit(prompt(5), max_new_tokens=60, streamer=held)]
        requests += [engine.submit(prompt(5, seed), max_new_tokens=60) for seed in range(1, 8)]
        readers = [asyncio.create_task(read(request)) for request in requests]
        while not held.reached.is_set():
            await asyncio.sleep(0.001)
        await asyncio.to_thread(engine.close)
        await asyncio.gather(*readers)
        assert all(request.finish_reason == "cancelled" for request in requests)
        return await asyncio.gather(*[read(request) for request in requests])

    run_async(main())

"""The end of an engine while threads wait, run or call back."""

from __future__ import annotations

import asyncio

import pytest
import torch

from speccompile.errors import Closed
from speccompile.runtime.engine import Engine
from speccompile.runtime.request import Request
from speccompile.runtime.request_submitter import Capacity
from support.engines import MAX_BATCH, PATIENCE, Make, UntilClosed, admit_all, prompt, threads
from support.errors import raises
from support.recorder import Recorder


def test_close_while_another_thread_serves_and_others_wait(engine: Engine) -> None:
    """All threads wake, whatever they wait for, and receive the error."""
    held = UntilClosed(engine)
    # The first of them holds the step on until close() was called, so none of them can come to its end before.
    first = engine.submit(prompt(3), max_new_tokens=100, streamer=held)
    requests = [first, *[engine.submit(prompt(3, seed), max_new_tokens=100) for seed in range(1, 2 * MAX_BATCH)]]
    reasons: list[str] = []

    async def read(request: Request) -> None:
        async for _ in request:
            pass

    def read_async() -> None:
        asyncio.run(read(requests[1]))
        reasons.append(requests[1].finish_reason)

    def read_all() -> None:
        for _ in requests[2]:
            pass
        reasons.append(requests[2].finish_reason)

    def wait(request: Request) -> None:
        reasons.append(request.result().finish_reason)

    waits = [lambda request=request: wait(request) for request in (first, requests[-1])]
    with threads(engine.serve, engine.run, read_async, read_all, *waits):
        assert held.reached.wait(PATIENCE)
        engine.close()
        assert [request.finish_reason for request in requests] == ["cancelled"] * len(requests)
    assert reasons == ["cancelled"] * 4
    assert held.received[-1] == "end"
    assert engine.capacity() == Capacity(slots=4, free_slots=4, waiting=0, free_waiting=1028)


def test_what_a_closed_engine_does(make: Make) -> None:
    spec = make()
    engine = spec.engine
    engine.close()
    engine.close()
    with raises(Closed):
        engine.submit([1, 2])
    with pytest.raises(Closed):
        engine.step()
    with pytest.raises(Closed):
        spec.generate(torch.tensor([[1, 2]]))
    with pytest.raises(Closed):
        spec.check([[1, 2]])
    engine.run()
    engine.serve()
    spec.close()
    with pytest.raises(Closed):
        spec.generate(torch.tensor([[1, 2]]))
    with pytest.raises(Closed):
        _ = spec.engine


def test_close_cancels_those_who_wait_and_those_who_run(engine: Engine) -> None:
    streamers = [Recorder() for _ in range(6)]
    requests = [engine.submit(prompt(3, i), max_new_tokens=100, streamer=streamers[i]) for i in range(6)]
    admit_all(engine)
    engine.close()
    assert [request.finish_reason for request in requests] == ["cancelled"] * 6
    # The reader of a streamer learns that nothing more comes, also where nothing came.
    assert [streamer.received.count("end") for streamer in streamers] == [1] * 6
    assert streamers[5].received == ["end"]
    assert requests[0].result().finish_reason == "cancelled"


def test_several_threads_may_close(engine: Engine) -> None:
    request = engine.submit(prompt(3), max_new_tokens=100)
    engine.step()
    with threads(engine.close, engine.close, engine.close):
        pass
    assert request.finish_reason == "cancelled"


def test_the_engine_is_a_context_manager(make: Make) -> None:
    engine = make().engine
    with engine as entered:
        assert entered is engine
        request = engine.submit([1, 2, 3], max_new_tokens=100)
    assert request.finish_reason == "cancelled"
    with pytest.raises(Closed):
        engine.submit([1, 2])


def test_leaving_by_an_error_closes_too(make: Make) -> None:
    engine = make().engine
    with pytest.raises(ZeroDivisionError), engine:
        _ = 1 // 0
    with pytest.raises(Closed):
        engine.submit([1, 2])


def test_generate_is_told_when_another_thread_closes(make: Make) -> None:
    spec = make()
    held = UntilClosed(spec.engine)

    def generate() -> None:
        with pytest.raises(Closed):
            spec.generate(torch.tensor([prompt(3)]), max_new_tokens=100, streamer=held)

    with threads(generate):
        assert held.reached.wait(PATIENCE)
        spec.close()

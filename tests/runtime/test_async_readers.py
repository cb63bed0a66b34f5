"""Readers in event loops, and the thread that takes turns for them."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest

from speccompile.runtime.async_driver import AsyncDriver
from speccompile.runtime.async_readers import AsyncReaders
from speccompile.runtime.request import Request
from support.engine_parts import request_of
from support.engines import PATIENCE, run_async
from support.loop_parts import TurnParts

NAME = "speccompile-driver"


def drivers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == NAME]


def wait_for_none() -> None:
    deadline = time.monotonic() + PATIENCE
    while drivers():
        assert time.monotonic() < deadline
        time.sleep(0.001)


@pytest.fixture
def parts() -> TurnParts:
    return TurnParts()


@pytest.fixture
def driver(parts: TurnParts) -> AsyncDriver:
    return AsyncDriver(parts.loop)


def test_what_is_there_already_is_not_waited_for(parts: TurnParts, driver: AsyncDriver) -> None:
    request = parts.running()
    request.add([1])
    run_async(driver.wait(request, 0))
    request.end("cancelled")
    run_async(driver.wait(request, 1))
    assert parts.steps.count == 0 and len(parts.loop.readers) == 0


def test_one_thread_steps_for_all_readers_and_ends_with_the_last_one(parts: TurnParts, driver: AsyncDriver) -> None:
    requests, stepping = [parts.running(), parts.running()], set[threading.Thread]()

    def step() -> None:
        stepping.add(threading.current_thread())
        requests[parts.steps.count % 2].add([parts.steps.count])

    async def read(request: Request) -> None:
        for seen in range(3):
            await driver.wait(request, seen)
            assert len(request.new_tokens) > seen

    async def main() -> None:
        await asyncio.gather(*map(read, requests))

    parts.steps.work = step
    run_async(main())
    assert [thread.name for thread in stepping] == [NAME]
    wait_for_none()


def test_a_reader_that_is_cancelled_is_not_waited_for(parts: TurnParts, driver: AsyncDriver) -> None:
    request = parts.running()

    async def main() -> None:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(driver.wait(request, 0), 0.01)

    run_async(main())
    assert len(parts.loop.readers) == 0 and not request.finished
    wait_for_none()


def test_no_thread_is_started_for_an_engine_that_was_closed(parts: TurnParts, driver: AsyncDriver) -> None:
    request = parts.running()
    parts.loop.close()
    run_async(driver.wait(request, 0))
    assert request.finish_reason == "cancelled" and not drivers()


def waiting(readers: AsyncReaders, request: Request) -> None:
    """A reader whose loop was closed while it waited."""

    async def add() -> None:
        readers.add(asyncio.Event(), request, 0)

    asyncio.run(add())


def test_a_reader_whose_loop_was_closed_is_forgotten_when_it_would_be_woken(parts: TurnParts) -> None:
    readers, request = AsyncReaders(), request_of(parts.arena)
    waiting(readers, request)
    assert readers.wake() == [] and len(readers) == 1, "there is nothing to read yet"
    request.add([1])
    assert readers.wake() == [request] and len(readers) == 0

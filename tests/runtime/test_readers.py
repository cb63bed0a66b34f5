"""Readers of a request, in loops, threads and tasks: each gets all tokens, as they come."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from typing import Any

import pytest
from transformers import LlamaForCausalLM

from speccompile.errors import RequestFailed
from speccompile.runtime.engine import Engine
from speccompile.runtime.request import Request
from support.engines import Calls, Gate, Make, greedy, prompt, read, run_async, threads
from support.errors import raises


@pytest.mark.parametrize("of", [lambda request: request, lambda request: request.stream()])
def test_a_for_loop_drives_the_engine(engine: Engine, model: LlamaForCausalLM, of: Callable[[Request], Any]) -> None:
    request = engine.submit(prompt(5), max_new_tokens=15)
    assert list(of(request)) == greedy(model, prompt(5), 15)
    assert request.finish_reason == "max_new_tokens" and engine.idle


@pytest.mark.parametrize("of", [lambda request: request, lambda request: request.stream()])
def test_an_async_for_loop_drives_the_engine(
    engine: Engine, model: LlamaForCausalLM, of: Callable[[Request], Any]
) -> None:
    async def main() -> list[int]:
        return [token async for token in of(engine.submit(prompt(5), max_new_tokens=15))]

    assert run_async(main()) == greedy(model, prompt(5), 15)


def test_tokens_come_before_the_request_has_ended(engine: Engine) -> None:
    request = engine.submit(prompt(5), max_new_tokens=15)
    reader = iter(request)
    first = next(reader)
    assert request.new_tokens[0] == first and len(request.new_tokens) < 15 and not request.finished


def test_async_tokens_come_before_the_request_has_ended(make: Make) -> None:
    """The first token is read while the step after it cannot even begin."""
    gate = Gate()
    engine = make(policy=gate).engine

    async def main() -> None:
        request = engine.submit(prompt(5), max_new_tokens=15)
        async for _ in request:
            if not gate.opened.is_set():
                assert len(request.new_tokens) == 1
                gate.open()
        assert request.finished

    run_async(main())


def test_a_stream_may_be_read_again(engine: Engine, model: LlamaForCausalLM) -> None:
    stream = engine.submit(prompt(5), max_new_tokens=15).stream()
    assert list(stream) == list(stream) == greedy(model, prompt(5), 15)


def test_readers_in_turns_each_get_all(engine: Engine, model: LlamaForCausalLM) -> None:
    request = engine.submit(prompt(5), max_new_tokens=15)
    one, other = iter(request), iter(request.stream())
    got = [(next(one), next(other)) for _ in range(7)]
    assert [left for left, _ in got] == [right for _, right in got] == greedy(model, prompt(5), 15)[:7]
    assert list(one) == list(other) == greedy(model, prompt(5), 15)[7:]


def test_a_reader_that_comes_late_gets_all(engine: Engine, model: LlamaForCausalLM) -> None:
    request = engine.submit(prompt(5), max_new_tokens=15)
    reader = iter(request)
    for _ in range(6):
        next(reader)
    late = iter(request)
    assert next(late) == greedy(model, prompt(5), 1)[0]
    request.result()
    assert list(request) == greedy(model, prompt(5), 15)
    assert run_async(read(request)) == greedy(model, prompt(5), 15)


def test_readers_in_several_threads_each_get_all(engine: Engine, model: LlamaForCausalLM) -> None:
    requests = [engine.submit(prompt(5, seed), max_new_tokens=25) for seed in range(3)]
    got: list[tuple[int, list[int]]] = []

    def reader(number: int) -> None:
        got.append((number % 3, list(requests[number % 3])))

    with threads(*[lambda number=number: reader(number) for number in range(9)]):
        pass
    assert len(got) == 9
    assert all(text == greedy(model, prompt(5, seed), 25) for seed, text in got)


def test_two_async_readers_of_one_request(engine: Engine, model: LlamaForCausalLM) -> None:
    async def main() -> list[list[int]]:
        request = engine.submit(prompt(5), max_new_tokens=15)
        return await asyncio.gather(read(request), read(request))

    assert run_async(main()) == [greedy(model, prompt(5), 15)] * 2


def test_readers_of_a_failed_request_get_its_tokens_and_then_the_error(engine: Engine, model: LlamaForCausalLM) -> None:
    def fail() -> None:
        raise OSError("the pipe is closed")

    request = engine.submit(prompt(5), max_new_tokens=15, streamer=Calls(fail, at=4))
    got: list[int] = []
    with raises(RequestFailed, reason=re.compile("OSError: the pipe is closed")) as caught:
        for token in request:
            got.append(token)
    assert isinstance(caught.value.__cause__, OSError) and caught.value.__cause__ is request.error
    assert got == request.new_tokens == greedy(model, prompt(5), 3)
    # A late caller receives the same.
    for late in (request.result, lambda: list(request), lambda: run_async(read(request))):
        with raises(RequestFailed, reason=re.compile("OSError: the pipe is closed")):
            late()

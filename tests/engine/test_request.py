"""What the owner of a request sees of it: tokens as they come, its result, its end."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from engines import (
    MAX_BATCH,
    PATIENCE,
    Calls,
    Make,
    UntilClosed,
    admit_all,
    greedy,
    prompt,
    serving,
    threads,
)
from test_listener import Recorder, tokenizer
from transformers import LlamaForCausalLM, PreTrainedModel, PreTrainedTokenizerBase

import speccompile
from speccompile.errors import RequestFailed
from speccompile.runtime.engine import Engine
from speccompile.runtime.request import Request


class Gate:
    """A policy that lets no decode step begin before :meth:`open`: the others stay where they are."""

    def __init__(self, draft_len: int = 3) -> None:
        self.draft_len = draft_len
        self.opened = threading.Event()
        self.reached = threading.Event()

    def choose(self, live_rows: int) -> int:
        self.reached.set()
        assert self.opened.wait(PATIENCE)
        return self.draft_len

    def open(self) -> None:
        self.opened.set()


def run_async(coroutine: Awaitable[Any]) -> Any:
    async def limited() -> Any:
        return await asyncio.wait_for(coroutine, PATIENCE / 2)

    return asyncio.run(limited())


async def read(request: Request) -> list[int]:
    return [token async for token in request]


# --- readers -------------------------------------------------------------------------------------


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
    first = next(iter(request))
    assert request.new_tokens[0] == first and len(request.new_tokens) < 15 and not request.finished


def test_async_tokens_come_before_the_request_has_ended(make: Make) -> None:
    """The first token is read while the step behind it cannot even begin."""
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
    with pytest.raises(RequestFailed, match="error of its own: OSError: the pipe is closed") as caught:
        for token in request:
            got.append(token)
    assert isinstance(caught.value.__cause__, OSError) and caught.value.__cause__ is request.error
    assert got == request.new_tokens == greedy(model, prompt(5), 3)
    # Whoever comes late is told the same.
    for late in (request.result, lambda: list(request), lambda: run_async(read(request))):
        with pytest.raises(RequestFailed, match="OSError: the pipe is closed"):
            late()


# --- result --------------------------------------------------------------------------------------


def test_a_result(engine: Engine, model: LlamaForCausalLM) -> None:
    request = engine.submit(prompt(5), max_new_tokens=15)
    result = request.result()
    assert result.token_ids == greedy(model, prompt(5), 15)
    assert result.finish_reason == request.finish_reason == "max_new_tokens"
    assert result.stats is request.stats and result.stats.prompt_tokens == 5
    assert result.stats.new_tokens == 15
    # The drafter is the whole model: every step emits four, but the last, which is cut.
    assert result.acceptance_length == result.stats.acceptance_length == pytest.approx(14 / 4)
    assert result.text is None
    assert request.result().token_ids == result.token_ids
    # A list of the caller's own.
    result.token_ids.clear()
    assert request.result().token_ids == greedy(model, prompt(5), 15)


@pytest.mark.parametrize("timeout", [0, -1, 0.0])
def test_no_time_at_all(engine: Engine, model: LlamaForCausalLM, timeout: float) -> None:
    request = engine.submit(prompt(5), max_new_tokens=15)
    with pytest.raises(TimeoutError, match=f"has not ended within {timeout} s"):
        request.result(timeout)
    assert request.new_tokens == [] and not request.finished
    request.result()
    assert request.result(timeout).token_ids == greedy(model, prompt(5), 15), "what has ended is there at once"


def test_time_runs_out_between_own_steps(make: Make, model: LlamaForCausalLM) -> None:
    class Slow:
        def choose(self, live_rows: int) -> int:
            time.sleep(0.03)
            return 3

    engine = make(policy=Slow()).engine
    request = engine.submit(prompt(5), max_new_tokens=100)
    with pytest.raises(TimeoutError, match=r"within 0.02 s"):
        request.result(timeout=0.02)
    assert not request.finished and len(request.new_tokens) >= 1
    assert request.result().token_ids == greedy(model, prompt(5), 100)


def test_time_runs_out_while_another_thread_steps(make: Make, model: LlamaForCausalLM) -> None:
    gate = Gate()
    engine = make(policy=gate).engine
    with serving(engine):
        request = engine.submit(prompt(5), max_new_tokens=15)
        assert gate.reached.wait(PATIENCE)
        with pytest.raises(TimeoutError, match=r"within 0.05 s"):
            request.result(timeout=0.05)
        assert not request.finished
        gate.open()
        assert request.result(timeout=PATIENCE).token_ids == greedy(model, prompt(5), 15)


def test_text(engine: Engine, model: LlamaForCausalLM) -> None:
    letters = tokenizer()
    result = engine.submit(prompt(5), max_new_tokens=15, tokenizer=letters).result()
    assert result.text == letters.decode(greedy(model, prompt(5), 15)) != ""


def test_text_leaves_special_tokens_out(engine: Engine, model: LlamaForCausalLM) -> None:
    letters, new = tokenizer(), greedy(model, prompt(5), 15)
    letters.add_special_tokens({"eos_token": letters.convert_ids_to_tokens(new[6])})
    result = engine.submit(prompt(5), max_new_tokens=15, tokenizer=letters, eos_token_id=new[6]).result()
    cut = new[: new.index(new[6]) + 1]
    assert result.token_ids == cut and result.finish_reason == "eos"
    assert result.text == letters.decode(cut[:-1])


def test_a_stop_string_is_part_of_the_text(engine: Engine, model: LlamaForCausalLM) -> None:
    letters = tokenizer()
    text = letters.decode(greedy(model, prompt(5), 15))
    result = engine.submit(prompt(5), max_new_tokens=15, tokenizer=letters, stop=text[9:12]).result()
    assert result.finish_reason == "stop"
    assert result.text is not None and text[9:12] in result.text and text.startswith(result.text)


@pytest.mark.real
def test_a_real_text_ends_at_a_stop_string(smollm2: tuple[PreTrainedModel, PreTrainedTokenizerBase]) -> None:
    """Token for token as transformers' generate with the same stop strings, sentence marks and words."""
    model, words = smollm2
    ids = words("The capital of France is", return_tensors="pt").input_ids
    with speccompile.wrap(model, None, tiers=(0,), max_len=32, backend="eager") as spec:
        for stop in (".", [" the city", "\n"]):
            expected = model.generate(ids, max_new_tokens=20, do_sample=False, stop_strings=stop, tokenizer=words)
            request = spec.engine.submit(ids, max_new_tokens=20, stop=stop, tokenizer=words)
            assert request.result().token_ids == expected[0, ids.shape[1] :].tolist()
            assert request.result().text == words.decode(request.new_tokens, skip_special_tokens=True)
            assert request.finish_reason == "stop"


# --- what it tells of itself ---------------------------------------------------------------------


def test_timings_come_one_after_another(engine: Engine) -> None:
    request = engine.submit(prompt(40), max_new_tokens=10)
    time.sleep(0.01)
    engine.step()
    assert request.new_tokens == []
    time.sleep(0.01)
    engine.step()
    assert len(request.new_tokens) == 1
    time.sleep(0.01)
    timings = request.result().timings
    assert timings.queued is not None and timings.first_token is not None
    assert timings.queued >= 0.01
    assert timings.queued + 0.01 <= timings.first_token
    assert timings.first_token + 0.01 <= timings.total


def test_timings_of_one_that_never_had_a_slot(engine: Engine) -> None:
    request = engine.submit(prompt(5), max_new_tokens=10)
    request.cancel()
    timings = request.result().timings
    assert timings.queued is None and timings.first_token is None and timings.total >= 0


def test_timings_of_one_without_a_token(engine: Engine) -> None:
    request = engine.submit(prompt(40), max_new_tokens=10)
    engine.step()
    request.cancel()
    assert request.timings.queued is not None and request.timings.first_token is None


def test_timings_go_on_until_the_end(engine: Engine) -> None:
    request = engine.submit(prompt(5), max_new_tokens=10)
    before = request.timings
    time.sleep(0.001)
    assert request.timings.total > before.total
    request.result()
    at_end = request.timings
    time.sleep(0.001)
    assert request.timings == at_end


def test_repr(engine: Engine) -> None:
    request = engine.submit(prompt(4), max_new_tokens=10)
    assert repr(request) == "<Request of 4 tokens, 0 new, waiting>"
    engine.step()
    assert repr(request) == f"<Request of 4 tokens, 1 new, in slot {request.slot}>"
    engine.run()
    assert repr(request) == "<Request of 4 tokens, 10 new, max_new_tokens>"


# --- cancelling ----------------------------------------------------------------------------------


def test_cancelling_one_that_waits(make: Make, model: LlamaForCausalLM) -> None:
    engine = make(max_waiting=1).engine
    running = [engine.submit(prompt(5, seed), max_new_tokens=30) for seed in range(MAX_BATCH)]
    admit_all(engine)
    request = engine.submit(prompt(5, 9), max_new_tokens=5)
    assert engine.capacity().room == 0
    assert request.cancel() is True
    assert request.finished and request.slot == -1 and request.new_tokens == []
    # Its place is free at once.
    assert engine.capacity().room == 1
    engine.run()
    assert request.new_tokens == [] and request.timings.queued is None
    assert [other.new_tokens for other in running] == [greedy(model, prompt(5, seed), 30) for seed in range(4)]


def test_cancelling_one_whose_prompt_is_being_read(engine: Engine, model: LlamaForCausalLM) -> None:
    request = engine.submit(prompt(40), max_new_tokens=5)
    engine.step()
    assert 0 < request.cached < 40 and request.new_tokens == []
    assert request.cancel() is True
    assert engine.idle and engine.capacity().free_slots == MAX_BATCH
    # What was read of the prompt is no worse for that: it may be used again.
    again = engine.submit(prompt(40), max_new_tokens=5)
    assert again.result().token_ids == greedy(model, prompt(40), 5)
    assert again.stats.reused_tokens == request.cached


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


def test_cancelling_twice_or_after_the_end(engine: Engine) -> None:
    request, ended = (engine.submit(prompt(5, seed), max_new_tokens=4) for seed in range(2))
    assert request.cancel() is True
    assert request.cancel() is False
    ended.result()
    assert ended.cancel() is False
    assert ended.finish_reason == "max_new_tokens"


def test_cancelling_tells_the_streamer_once(engine: Engine) -> None:
    recorder = Recorder()
    request = engine.submit(prompt(5), max_new_tokens=40, streamer=recorder)
    engine.step()
    request.cancel()
    request.cancel()
    engine.run()
    assert recorder.received[-1] == "end" and recorder.received.count("end") == 1


def test_cancelling_from_another_thread_ends_it_there(engine: Engine, model: LlamaForCausalLM) -> None:
    """In the middle of a step, while the owner waits for the result: no token comes behind it."""
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


# --- who leaves ----------------------------------------------------------------------------------


def test_leaving_a_plain_for_cancels_nothing(engine: Engine, model: LlamaForCausalLM) -> None:
    request = engine.submit(prompt(5), max_new_tokens=15)
    for _ in request:
        break
    assert not request.finished
    assert request.result().token_ids == greedy(model, prompt(5), 15)


def test_leaving_an_async_for_cancels(engine: Engine) -> None:
    """Nobody reads on."""

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


# --- many at once --------------------------------------------------------------------------------


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
    """Nobody can wake the reader any more, so its request is cancelled, and nobody else notices."""
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

"""The engine: what submit takes, who waits for whom, many threads at once, the end; and generate on top of it."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from test_listener import Recorder, tokenizer
from tiny import tiny_llama
from transformers import LlamaForCausalLM, MaxLengthCriteria, PreTrainedTokenizerFast, StoppingCriteriaList

from speccompile import Speculator
from speccompile.build import build
from speccompile.errors import (
    Closed,
    EmptyPrompt,
    InsideStep,
    InvalidInput,
    InvalidOption,
    ModelInTraining,
    PromptTooLong,
    QueueFull,
    RequestFailed,
    TokenOutOfVocabulary,
    TooManyEosTokens,
    TooManyRows,
    UnknownOption,
    WeightsReplaced,
)
from speccompile.pipelines import PREFILL_WIDTHS, prefill_widths
from speccompile.runtime.engine import Capacity, Engine
from speccompile.runtime.options import EngineOptions
from speccompile.runtime.policy import Policy
from speccompile.runtime.prefill import chunk_widths
from speccompile.runtime.request import Request
from speccompile.wrap import make_plan

VOCAB = 128
PAD = 127
MAX_BATCH = 4
MAX_LEN = 128
#: Longer than any wait that is no deadlock.
PATIENCE = 60

Make = Callable[..., Speculator]


# --- what all tests use --------------------------------------------------------------------------


class Stuck(BaseException):
    """No Exception, which the engine might take for some request's own."""


def time_limit() -> Iterator[None]:
    """Makes a deadlock of the main thread a failure of its test."""

    def stop(*_: Any) -> None:
        raise Stuck(f"nothing came of it in {PATIENCE} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(PATIENCE)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@contextlib.contextmanager
def threads(*functions: Callable[[], Any]) -> Iterator[None]:
    """Runs functions in threads of their own beside what is in the ``with``, and raises what they raise."""
    errors: list[BaseException] = []

    def run(function: Callable[[], Any]) -> None:
        try:
            function()
        except BaseException as error:
            errors.append(error)

    started = [threading.Thread(target=run, args=(function,), daemon=True) for function in functions]
    for thread in started:
        thread.start()
    yield
    for thread in started:
        thread.join(PATIENCE / 2)
        assert not thread.is_alive(), "a thread does not come back"
    if errors:
        raise errors[0]


@contextlib.contextmanager
def serving(engine: Engine) -> Iterator[None]:
    """Another thread serves meanwhile; the engine is closed in the end."""
    with threads(engine.serve):
        try:
            yield
        finally:
            engine.close()


class Bench:
    """Speculators with engines of their own over one arena, one after another: nothing is captured again."""

    def __init__(self, model: LlamaForCausalLM, mode: str = "early_exit", **options: Any) -> None:
        if mode == "early_exit":
            # The whole model drafts, so that a step emits several tokens and is cut where a request ends.
            options = {"exit_layer": 2} | options
        sizes: dict[str, Any] = {"max_batch": MAX_BATCH, "max_len": MAX_LEN, "tiers": (0, 3)}
        self.model = model
        self.plan = make_plan(model, mode, backend="eager", **sizes | options)
        self.build = build(model, self.plan.info, self.plan.config)
        self.made: list[Engine] = []

    def make(self, policy: Policy | None = None, **options: Any) -> Speculator:
        """``options`` are those of the engine."""
        assert all(engine.idle for engine in self.made), "two would share the arena"
        policy = self.plan.policy if policy is None else policy
        spec = Speculator(self.model, self.plan.config, self.build, policy, EngineOptions(**options))
        self.made.append(spec.engine)
        return spec

    def maker(self) -> Iterator[Make]:
        """For a fixture. What was made may leave nothing behind, nor move a buffer."""
        before = self.build.arena.fingerprint()
        yield self.make
        made, self.made = self.made, []
        for engine in made:
            engine.close()
            assert engine.idle and engine.capacity().free_slots == engine.capacity().slots
            assert engine.capacity().waiting == 0
        assert not self.build.arena["alive"].any()
        assert self.build.arena.fingerprint() == before


def prompt(length: int, seed: int = 0) -> list[int]:
    """Without the id that pads."""
    return torch.randint(PAD, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def greedy(model: LlamaForCausalLM, prompt: list[int], new: int) -> list[int]:
    """transformers' own text, which is the same from test to test until an embedding is changed in place."""
    return list(_greedy(model, model.get_input_embeddings().weight._version, tuple(prompt), new))


@functools.cache
def _greedy(model: LlamaForCausalLM, version: int, prompt: tuple[int, ...], new: int) -> tuple[int, ...]:
    ids = torch.tensor([prompt])
    output = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, do_sample=False)
    return tuple(output[0, len(prompt) :].tolist())


def snapshot(engine: Engine) -> tuple[Any, ...]:
    arena = {name: tensor.clone() for name, tensor in engine.arena.items()}
    return engine.capacity(), engine.idle, engine.stats.steps, engine.stats.prefill_passes, arena


def assert_unchanged(engine: Engine, before: tuple[Any, ...]) -> None:
    now = snapshot(engine)
    assert now[:-1] == before[:-1]
    assert all(torch.equal(now[-1][name], tensor) for name, tensor in before[-1].items())


class Calls(Recorder):
    """A streamer that calls ``act`` when it gets its n-th value; the prompt is the first."""

    def __init__(self, act: Callable[[], Any], at: int = 2) -> None:
        super().__init__()
        self.act, self.at = act, at

    def put(self, value: torch.Tensor) -> None:
        super().put(value)
        if len(self.received) == self.at:
            self.act()


@pytest.fixture(autouse=True)
def limited() -> Iterator[None]:
    yield from time_limit()


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    return tiny_llama(vocab=VOCAB)


@pytest.fixture(scope="module")
def bench(model: LlamaForCausalLM) -> Bench:
    return Bench(model)


@pytest.fixture
def make(bench: Bench) -> Iterator[Make]:
    yield from bench.maker()


@pytest.fixture
def engine(make: Make) -> Engine:
    return make().engine


# --- prompts in chunks ---------------------------------------------------------------------------


WIDTHS = (8, 32, 128, 512)


@given(length=st.integers(1, 4000), widths=st.sampled_from([PREFILL_WIDTHS, WIDTHS, WIDTHS[:2], WIDTHS[:1]]))
def test_chunks_cover_the_prompt_and_none_is_superfluous(length: int, widths: tuple[int, ...]) -> None:
    chunks = chunk_widths(length, widths)
    assert set(chunks) <= set(widths)
    assert sum(chunks) >= length
    assert sum(chunks[:-1]) < length
    # What the last chunk is padded with stays small: half of what it holds, or less than the narrowest chunk.
    padding = sum(chunks) - length
    assert padding < widths[0] or padding <= (chunks[-1] - padding) // 2


@given(length=st.integers(1, 4000))
def test_a_length_that_is_a_width_is_one_chunk(length: int) -> None:
    assert (chunk_widths(length, PREFILL_WIDTHS) == [length]) == (length in PREFILL_WIDTHS)


@pytest.mark.parametrize(
    ("length", "chunks"),
    [(1, [8]), (9, [8, 8]), (21, [8, 8, 8]), (22, [32]), (33, [32, 8]), (600, [512, 128]), (1400, [512, 512, 512])],
)
def test_chunks_by_example(length: int, chunks: list[int]) -> None:
    assert chunk_widths(length, WIDTHS) == chunks


@given(max_len=st.integers(2, 5000))
def test_no_prefill_chunk_but_the_smallest_is_wider_than_a_text_can_be(max_len: int) -> None:
    widths = prefill_widths(max_len)
    assert widths == PREFILL_WIDTHS[: len(widths)] and widths
    assert all(width <= max_len for width in widths[1:])
    assert all(width > max_len for width in PREFILL_WIDTHS[len(widths) :])


# --- arguments of submit -------------------------------------------------------------------------


class NoStreamer:
    def put(self, value: torch.Tensor) -> None: ...


BAD: list[tuple[dict[str, Any], type[Exception], str]] = [
    (
        {"top_k": 5, "temperature": 1.0},
        UnknownOption,
        "submit does not take temperature, top_k. It takes: ids, max_new",
    ),
    ({"ids": []}, EmptyPrompt, "prompt 0 is empty"),
    ({"ids": torch.empty(1, 0, dtype=torch.int64)}, EmptyPrompt, "prompt 0 is empty"),
    ({"ids": [1] * MAX_LEN}, PromptTooLong, "128 tokens, but with max_len=128 a prompt can have at most 127"),
    *[
        ({"ids": ids}, InvalidInput, "prompt 0 is not valid")
        for ids in (
            [1.5],
            [True],
            "text",
            None,
            [[1], [2]],
            [[1, 2], [3]],
            [2**70],
            torch.zeros(2, 3, dtype=torch.int64),
            torch.zeros(1, 1, 3, dtype=torch.int64),
            torch.zeros(3, dtype=torch.int16),
            {1: 2},
        )
    ],
    ({"ids": [1, -1]}, TokenOutOfVocabulary, r"the token id -1, outside of 0 \.\. 127"),
    ({"ids": [VOCAB]}, TokenOutOfVocabulary, r"the token id 128, outside of 0 \.\. 127 \(vocabulary of 128\)"),
    *[({"max_new_tokens": n}, InvalidOption, "submit: max_new_tokens=") for n in (0, -1, 1.0, True, None, "3")],
    *[({"seed": seed}, InvalidOption, "submit: seed=") for seed in (-1, 2**63, 1.0, True, "1")],
    *[({"priority": n}, InvalidOption, "submit: priority=") for n in (2**63, -(2**63) - 1, None, 1.5, True)],
    *[({"streamer": streamer}, InvalidInput, "no methods put and end") for streamer in (NoStreamer(), [], print)],
    ({"stop": "a"}, InvalidInput, "stop strings need tokenizer="),
    *[({"stop": stop, "tokenizer": ...}, InvalidInput, "stop is not valid") for stop in ("", [], ["a", ""], [1], 5)],
    *[({"stopping_criteria": given}, InvalidInput, "it cannot be called") for given in (5, [print, 5])],
    ({"eos_token_id": list(range(9))}, TooManyEosTokens, "9 EOS ids, but a slot has room for 8"),
    *[({"eos_token_id": eos}, InvalidInput, "eos_token_id is not valid") for eos in ("x", 1.5, True, [1, None])],
]


@pytest.mark.parametrize(("arguments", "error", "message"), BAD, ids=[str(case[0])[:40] for case in BAD])
def test_a_bad_argument_is_refused_and_leaves_the_engine_as_it_was(
    engine: Engine, letters: PreTrainedTokenizerFast, arguments: dict[str, Any], error: type[Exception], message: str
) -> None:
    if "tokenizer" in arguments:
        arguments = arguments | {"tokenizer": letters}
    streamer = Recorder()
    before = snapshot(engine)
    with pytest.raises(error, match=message):
        engine.submit(**{"ids": [1, 2, 3], "streamer": streamer} | arguments)
    assert_unchanged(engine, before)
    assert streamer.received == []


@pytest.fixture(scope="module")
def letters() -> PreTrainedTokenizerFast:
    return tokenizer()


@pytest.mark.parametrize(
    "form", [list, tuple, torch.tensor, lambda ids: torch.tensor([ids]), lambda ids: torch.tensor(ids).int()]
)
def test_forms_of_a_prompt(engine: Engine, model: LlamaForCausalLM, form: Callable[[list[int]], Any]) -> None:
    request = engine.submit(form(prompt(5)), max_new_tokens=6)
    assert request.prompt == prompt(5)
    assert request.result().token_ids == greedy(model, prompt(5), 6)


def test_the_longest_prompt(engine: Engine, model: LlamaForCausalLM) -> None:
    request = engine.submit(prompt(MAX_LEN - 1), max_new_tokens=5)
    assert request.result().token_ids == greedy(model, prompt(MAX_LEN - 1), 1)
    assert request.finish_reason == "max_len"


def test_the_list_that_was_given_may_change_afterwards(engine: Engine, model: LlamaForCausalLM) -> None:
    given_ids = prompt(5)
    request = engine.submit(given_ids, max_new_tokens=6)
    given_ids[:] = [0] * 5
    assert request.result().token_ids == greedy(model, prompt(5), 6)


def test_the_bounds_of_seed_and_priority(engine: Engine) -> None:
    for seed, priority in ((0, -(2**63)), (2**63 - 1, 2**63 - 1), (None, 0)):
        assert engine.submit([1], max_new_tokens=1, seed=seed, priority=priority).result().token_ids


def test_eos_ids_of_the_generation_config_and_of_the_argument(
    engine: Engine, model: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = greedy(model, prompt(5), 20)
    monkeypatch.setattr(model.generation_config, "eos_token_id", text[7])
    config = engine.submit(prompt(5), max_new_tokens=20)
    argument = engine.submit(prompt(5), max_new_tokens=20, eos_token_id=[text[4]])
    engine.run()
    assert config.new_tokens == text[: text.index(text[7]) + 1]
    assert argument.new_tokens == text[: text.index(text[4]) + 1]
    assert config.finish_reason == argument.finish_reason == "eos"


# --- the model is still the one that was wrapped -------------------------------------------------


def test_a_model_put_in_training_mode_is_refused_and_runs_on(engine: Engine, model: LlamaForCausalLM) -> None:
    running = engine.submit(prompt(5), max_new_tokens=20)
    engine.step()
    before = snapshot(engine)
    model.train()
    try:
        with pytest.raises(ModelInTraining, match="LlamaForCausalLM is in training mode"):
            engine.submit([1, 2])
        assert_unchanged(engine, before)
        # What runs has the graph of the model in eval mode.
        running.result()
    finally:
        model.eval()
    assert running.new_tokens == greedy(model, prompt(5), 20)


def test_replaced_weights_are_refused(engine: Engine, model: LlamaForCausalLM) -> None:
    head = model.lm_head.weight
    before = snapshot(engine)
    model.lm_head.weight = torch.nn.Parameter(head.detach().clone())
    try:
        with pytest.raises(WeightsReplaced, match=r"lm_head\.weight of the model is another tensor"):
            engine.submit([1, 2])
        assert_unchanged(engine, before)
    finally:
        model.lm_head.weight = head
    assert engine.submit([1, 2], max_new_tokens=1).result().token_ids


def test_weights_that_have_another_path_now_are_refused(engine: Engine, model: LlamaForCausalLM) -> None:
    """As PEFT and quantizers leave them: the module is still there, inside of another one."""

    class Adapted(torch.nn.Module):
        def __init__(self, base: torch.nn.Module) -> None:
            super().__init__()
            self.base = base

    mlp = model.model.layers[0].mlp
    linear = mlp.up_proj
    mlp.up_proj = Adapted(linear)
    try:
        with pytest.raises(WeightsReplaced, match=r"mlp\.up_proj\.weight"):
            engine.submit([1, 2])
    finally:
        mlp.up_proj = linear


# --- capacity and the waiting queue --------------------------------------------------------------


def admit_all(engine: Engine) -> None:
    """Step until no slot is free."""
    while engine.capacity().free_slots:
        engine.step()


def test_capacity(make: Make) -> None:
    engine = make(max_waiting=3).engine
    assert engine.capacity() == Capacity(slots=4, free_slots=4, waiting=0, room=7)
    requests = [engine.submit(prompt(3, seed), max_new_tokens=100) for seed in range(6)]
    # Nobody has a slot before somebody steps, and the four free ones are promised to those who wait.
    assert engine.capacity() == Capacity(slots=4, free_slots=4, waiting=6, room=1)
    admit_all(engine)
    assert engine.capacity() == Capacity(slots=4, free_slots=0, waiting=2, room=1)
    requests[0].cancel()
    assert engine.capacity() == Capacity(slots=4, free_slots=1, waiting=2, room=2)
    requests[5].cancel()
    assert engine.capacity() == Capacity(slots=4, free_slots=1, waiting=1, room=3)
    engine.run()
    assert engine.capacity() == Capacity(slots=4, free_slots=4, waiting=0, room=7)


@pytest.mark.parametrize("limit", [0, 2])
def test_a_full_queue(make: Make, limit: int) -> None:
    engine = make(max_waiting=limit).engine
    first = [engine.submit(prompt(3, seed), max_new_tokens=100) for seed in range(MAX_BATCH + limit)]
    before = snapshot(engine)
    with pytest.raises(
        QueueFull, match=f"no room for 1 more: {MAX_BATCH + limit} requests wait, and max_waiting={limit}"
    ):
        engine.submit([1])
    assert_unchanged(engine, before)
    admit_all(engine)
    # All slots are taken now, and as many wait as may.
    with pytest.raises(QueueFull, match=f"no room for 1 more: {limit} requests wait"):
        engine.submit([1])
    first[-1].cancel()
    assert engine.capacity().room == 1
    assert engine.submit([1], max_new_tokens=2).result().finish_reason == "max_new_tokens"


def test_a_batch_has_room_or_has_not(make: Make) -> None:
    spec = make(max_waiting=0)
    ids = torch.tensor([prompt(5, seed) for seed in range(MAX_BATCH)])
    spec.engine.submit([1, 2], max_new_tokens=100)
    spec.engine.step()
    with pytest.raises(QueueFull, match="no room for 4 more: 0 requests wait"):
        spec.generate(ids, max_new_tokens=3)
    assert spec.engine.capacity().waiting == 0
    assert spec.generate(ids[1:], max_new_tokens=3).shape == (3, 8)


def test_of_those_who_wait_the_larger_number_goes_first(engine: Engine) -> None:
    order: list[int] = []

    class Starts(Recorder):
        def __init__(self, name: int) -> None:
            super().__init__()
            self.name = name

        def put(self, value: torch.Tensor) -> None:
            if not self.received:
                order.append(self.name)
            super().put(value)

    priorities = [0, 5, 0, -1, 5, 2, 0]
    for name, priority in enumerate(priorities):
        engine.submit(prompt(3, name), max_new_tokens=4, priority=priority, streamer=Starts(name))
    engine.run()
    assert order == [1, 4, 5, 0, 2, 6, 3]


def test_a_large_number_displaces_nobody_who_runs(engine: Engine, model: LlamaForCausalLM) -> None:
    running = [engine.submit(prompt(3, seed), max_new_tokens=30) for seed in range(MAX_BATCH)]
    admit_all(engine)
    urgent = engine.submit(prompt(3, 9), max_new_tokens=5, priority=100)
    slots = [request.slot for request in running]
    engine.step()
    assert [request.slot for request in running] == slots and urgent.slot == -1
    engine.run()
    assert [request.new_tokens for request in running] == [greedy(model, prompt(3, seed), 30) for seed in range(4)]
    assert urgent.new_tokens == greedy(model, prompt(3, 9), 5)


# --- stepping ------------------------------------------------------------------------------------


def test_a_step_returns_those_who_had_a_row(engine: Engine) -> None:
    assert engine.step() == []
    request = engine.submit(prompt(5), max_new_tokens=3)
    # With nobody to keep waiting, the prompt alone is read.
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
    each, count = 50, 5
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
                assert request.finish_reason == ("cancelled" if cancelled else "max_new_tokens")
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
    run_step = engine.run_step

    def counted() -> list[Request]:
        nonlocal most
        inside.append(1)
        most = max(most, len(inside))
        try:
            time.sleep(0.0005)
            return run_step()
        finally:
            inside.pop()

    monkeypatch.setattr(engine, "run_step", counted)
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
    run_step = engine.run_step

    def counted() -> list[Request]:
        steps.append(time.monotonic())
        return run_step()

    engine.run_step = counted  # type: ignore[method-assign]
    with serving(engine):
        while not steps:
            time.sleep(0.001)
        time.sleep(0.05)
        # One look at the empty queue, and no more.
        assert len(steps) == 1
        assert engine.submit(prompt(5), max_new_tokens=5).result(PATIENCE).token_ids == greedy(model, prompt(5), 5)


# --- the end -------------------------------------------------------------------------------------


class UntilClosed(Recorder):
    """A streamer that holds the step on until the engine is being closed."""

    def __init__(self, engine: Engine, at: int = 3) -> None:
        super().__init__()
        self.engine, self.at = engine, at
        self.reached = threading.Event()

    def put(self, value: torch.Tensor) -> None:
        super().put(value)
        if len(self.received) >= self.at:
            self.reached.set()
            while not self.engine._closed:
                time.sleep(0.001)


def test_close_while_another_thread_serves_and_others_wait(engine: Engine) -> None:
    """Everybody wakes, whatever they wait for, and is told."""
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
    assert engine.capacity() == Capacity(slots=4, free_slots=4, waiting=0, room=1028)


def test_what_a_closed_engine_does(make: Make) -> None:
    spec = make()
    engine = spec.engine
    engine.close()
    engine.close()
    with pytest.raises(Closed, match="this speculator was closed; wrap the model again"):
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
    # Whoever reads from a streamer learns that nothing more comes, also where nothing came.
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


# --- inside of a callback ------------------------------------------------------------------------


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
    """It would wait for the step that it is part of. ``at`` 1 is at admission, 2 behind prefill, 4 behind a tier."""
    spec = make()
    # Far back, so that it is not over when the callback waits for it.
    other = spec.engine.submit(prompt(4, 1), max_new_tokens=30, priority=-1)
    bad = spec.engine.submit(prompt(3), max_new_tokens=20, streamer=Calls(lambda: WAITS[wait](spec, other), at))
    spec.engine.run()
    with pytest.raises(RequestFailed, match="InsideStep") as caught:
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
        with pytest.raises(InsideStep, match=r"step\(\) was called in a callback"):
            engine.step()
        with pytest.raises(InsideStep, match="wait in another thread"):
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
    """Its own request's tokens so far are there; only behind them it would have to wait."""
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
    """``cancel`` outside of a step tells the streamer, too: nobody may be left over."""

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


# --- generate beside others ----------------------------------------------------------------------


def test_generate_while_another_thread_serves_others(make: Make, model: LlamaForCausalLM) -> None:
    spec = make()
    others = [spec.engine.submit(prompt(6, seed), max_new_tokens=25) for seed in range(10, 18)]
    ids = torch.tensor([prompt(5, seed) for seed in range(MAX_BATCH)])
    with serving(spec.engine):
        outputs = [spec.generate(ids, max_new_tokens=9) for _ in range(3)]
        for other in others:
            other.result(PATIENCE)
    expected = torch.tensor([prompt(5, seed) + greedy(model, prompt(5, seed), 9) for seed in range(MAX_BATCH)])
    assert all(torch.equal(output, expected) for output in outputs)
    assert [other.new_tokens for other in others] == [greedy(model, prompt(6, seed), 25) for seed in range(10, 18)]


def test_several_threads_generate_at_once(make: Make, model: LlamaForCausalLM) -> None:
    """None of them serves: whoever waits steps for all."""
    spec = make()
    outputs: dict[int, list[list[int]]] = {}

    def generate(number: int) -> None:
        ids = torch.tensor([prompt(5, number), prompt(5, number + 10)])
        outputs[number] = [spec.generate(ids, max_new_tokens=12).tolist() for _ in range(4)]

    with threads(*[lambda number=number: generate(number) for number in range(4)]):
        pass
    for number, rows in outputs.items():
        texts = [prompt(5, seed) + greedy(model, prompt(5, seed), 12) for seed in (number, number + 10)]
        assert rows == [texts] * 4


def test_generate_beside_a_request_that_nobody_reads(make: Make, model: LlamaForCausalLM) -> None:
    spec = make()
    other = spec.engine.submit(prompt(6, 1), max_new_tokens=60)
    output = spec.generate(torch.tensor([prompt(5)]), max_new_tokens=5)
    assert output[0, 5:].tolist() == greedy(model, prompt(5), 5)
    assert other.result().token_ids == greedy(model, prompt(6, 1), 60)


def test_what_goes_wrong_with_one_row_of_generate_ends_them_all_and_nobody_else(
    make: Make, model: LlamaForCausalLM
) -> None:
    spec = make()
    other = spec.engine.submit(prompt(6, 1), max_new_tokens=60)

    def broken(ids: torch.Tensor, scores: None) -> torch.Tensor:
        if ids[0, 0] == prompt(5, 2)[0] and ids.shape[1] == 8:
            raise ZeroDivisionError("in row 1")
        return torch.tensor([False])

    ids = torch.tensor([prompt(5, seed) for seed in (1, 2, 3)])
    with pytest.raises(ZeroDivisionError, match="in row 1"):
        spec.generate(ids, max_new_tokens=20, stopping_criteria=broken)
    assert spec.engine.running == [other]
    assert other.result().token_ids == greedy(model, prompt(6, 1), 60)


# --- generate: continuations ---------------------------------------------------------------------


@pytest.mark.parametrize("copies", [1, 2, 4])
def test_rows_of_several_continuations_follow_one_another(make: Make, model: LlamaForCausalLM, copies: int) -> None:
    """As transformers orders them: by ``repeat_interleave``. Its own greedy search refuses more than one."""
    spec = make()
    ids = torch.tensor([prompt(9, seed) for seed in range(MAX_BATCH // copies)])
    ids[0, :3] = PAD
    mask = (ids != PAD).long()
    got = spec.generate(ids, mask, max_new_tokens=11, num_return_sequences=copies, pad_token_id=PAD)
    repeated = [tensor.repeat_interleave(copies, dim=0) for tensor in (ids, mask)]
    expected = model.generate(
        repeated[0], attention_mask=repeated[1], max_new_tokens=11, do_sample=False, pad_token_id=PAD
    )
    assert torch.equal(got, expected)


def test_a_prompt_is_read_once_for_all_its_continuations(make: Make) -> None:
    spec = make()
    ids = torch.tensor([prompt(40, 1), prompt(40, 2)])
    spec.generate(ids, max_new_tokens=5, num_return_sequences=2)
    read = [(request.prefill_tokens, request.reused_tokens) for request in spec.stats.requests]
    # The last token of a prompt is computed by each row's own first step.
    assert read == [(40, 0), (0, 39)] * 2
    assert spec.stats.prefill_tokens == 80


def test_without_reuse_every_continuation_reads_its_prompt(make: Make, model: LlamaForCausalLM) -> None:
    spec = make(prefix_reuse=False)
    got = spec.generate(torch.tensor([prompt(40)]), max_new_tokens=5, num_return_sequences=3)
    assert [request.prefill_tokens for request in spec.stats.requests] == [40] * 3
    assert got[:, 40:].tolist() == [greedy(model, prompt(40), 5)] * 3


@pytest.mark.parametrize("copies", [0, -1, 1.0, True, None, "2"])
def test_what_is_no_number_of_continuations(make: Make, copies: Any) -> None:
    with pytest.raises(InvalidOption, match="generate: num_return_sequences="):
        make().generate(torch.tensor([[1, 2]]), num_return_sequences=copies)


def test_continuations_count_as_rows(make: Make) -> None:
    with pytest.raises(TooManyRows, match="6 prompts, but max_batch=4"):
        make().generate(torch.tensor([[1, 2], [3, 4]]), num_return_sequences=3)


# --- generate: stop strings, criteria and streamers ----------------------------------------------


def both(model: LlamaForCausalLM, spec: Speculator, ids: torch.Tensor, **arguments: Any) -> torch.Tensor:
    """Our output, which is transformers' own."""
    mask = arguments.pop("attention_mask", torch.ones_like(ids))
    got = spec.generate(ids, mask, **arguments)
    expected = model.generate(ids, attention_mask=mask, do_sample=False, **arguments)
    assert torch.equal(got, expected), f"{got.tolist()} instead of {expected.tolist()}"
    return got


def absent(model: LlamaForCausalLM, ids: torch.Tensor, new: int) -> int:
    """A token that no row contains. As an EOS id it makes transformers pad rows that ended, which it else continues
    until the last one has ended."""
    texts = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, do_sample=False)
    return next(token for token in range(VOCAB) if not (texts == token).any())


@pytest.mark.parametrize("seed", range(12))
def test_stop_strings_end_a_row_where_transformers_does(
    make: Make, model: LlamaForCausalLM, letters: PreTrainedTokenizerFast, seed: int
) -> None:
    """Strings of one to five letters of the text, which may begin and end inside of tokens, or in the prompt."""
    spec = make()
    ids = torch.tensor([prompt(6, seed)])
    text = letters.decode([*prompt(6, seed), *greedy(model, prompt(6, seed), 30)])
    length, asked = 1 + seed % 5, len(letters.decode(prompt(6, seed)))
    begin = asked + random.Random(seed).randint(1 - length, 30)
    stop = text[begin : begin + length]
    got = both(model, spec, ids, max_new_tokens=30, stop_strings=stop, tokenizer=letters)
    assert stop in letters.decode(got[0])
    assert spec.stats.requests[0].finish_reason == "stop"


@pytest.mark.parametrize("seed", range(4))
def test_rows_end_at_stop_strings_of_their_own(
    make: Make, model: LlamaForCausalLM, letters: PreTrainedTokenizerFast, seed: int
) -> None:
    spec = make()
    ids = torch.tensor([prompt(6, 4 * seed + row) for row in range(MAX_BATCH)])
    ids[1, :2] = PAD
    mask = (ids != PAD).long()
    texts = model.generate(ids, attention_mask=mask, max_new_tokens=30, do_sample=False, pad_token_id=PAD)
    stops = [letters.decode(texts[row, 8 + 5 * row : 10 + 5 * row]) for row in range(3)]
    got = both(
        model,
        spec,
        ids,
        attention_mask=mask,
        max_new_tokens=30,
        stop_strings=stops,
        tokenizer=letters,
        eos_token_id=absent(model, ids, 30),
        pad_token_id=PAD,
    )
    assert {request.finish_reason for request in spec.stats.requests} >= {"stop"}
    assert got.shape[1] <= 36


def test_stop_strings_that_never_come(make: Make, model: LlamaForCausalLM, letters: PreTrainedTokenizerFast) -> None:
    spec = make()
    both(model, spec, torch.tensor([prompt(6)]), max_new_tokens=20, stop_strings=["abababab"], tokenizer=letters)
    assert spec.stats.requests[0].finish_reason == "max_new_tokens"


@pytest.mark.parametrize(
    ("stop", "given", "message"),
    [
        ("ab", False, "stop_strings is not valid: stop strings need tokenizer="),
        ("", True, "stop_strings is not valid"),
        (5, True, "stop_strings is not valid"),
    ],
)
def test_what_is_no_stop_string(
    make: Make, letters: PreTrainedTokenizerFast, stop: Any, given: bool, message: str
) -> None:
    with pytest.raises(InvalidInput, match=message):
        make().generate(torch.tensor([[1, 2]]), stop_strings=stop, tokenizer=letters if given else None)


class Meets:
    """A criterion that ends rows at any of some tokens, and keeps the ids that it was asked with."""

    def __init__(self, tokens: Sequence[int]) -> None:
        self.tokens = torch.tensor(tokens)
        self.asked: list[list[list[int]]] = []

    def __call__(self, ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        self.asked.append(ids.tolist())
        return torch.isin(ids[:, -1], self.tokens)


def test_a_criterion_is_asked_what_transformers_asks(make: Make, model: LlamaForCausalLM) -> None:
    text = greedy(model, prompt(6), 20)
    ours, theirs = Meets([text[9]]), Meets([text[9]])
    spec, ids = make(), torch.tensor([prompt(6)])
    got = spec.generate(ids, max_new_tokens=20, stopping_criteria=[ours])
    expected = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=20, do_sample=False, stopping_criteria=[theirs]
    )
    assert torch.equal(got, expected)
    assert ours.asked == theirs.asked and len(ours.asked) == text.index(text[9]) + 1
    assert spec.stats.requests[0].finish_reason == "stop"


@pytest.mark.parametrize("seed", range(3))
def test_criteria_of_a_batch(make: Make, model: LlamaForCausalLM, seed: int) -> None:
    ids = torch.tensor([prompt(6, 4 * seed + row) for row in range(MAX_BATCH)])
    texts = [greedy(model, row, 20) for row in ids.tolist()]
    criteria = StoppingCriteriaList(
        [Meets([text[3 + 4 * row] for row, text in enumerate(texts[:3])]), MaxLengthCriteria(max_length=23)]
    )
    eos = absent(model, ids, 20)
    got = both(model, make(), ids, max_new_tokens=20, stopping_criteria=criteria, eos_token_id=eos, pad_token_id=PAD)
    assert got.shape[1] <= 23


def test_criteria_and_stop_strings_and_eos_ids_together(
    make: Make, model: LlamaForCausalLM, letters: PreTrainedTokenizerFast
) -> None:
    ids = torch.tensor([prompt(6, row) for row in range(MAX_BATCH)])
    texts = [greedy(model, row, 30) for row in ids.tolist()]
    spec = make()
    both(
        model,
        spec,
        ids,
        max_new_tokens=30,
        eos_token_id=texts[0][12],
        stopping_criteria=[Meets([texts[1][8]])],
        stop_strings=[letters.decode(texts[2][15:17])],
        tokenizer=letters,
        pad_token_id=PAD,
    )
    assert {request.finish_reason for request in spec.stats.requests} >= {"eos", "stop"}


def test_a_streamer_hears_the_token_that_ends_the_text_and_the_end(make: Make, model: LlamaForCausalLM) -> None:
    """Also where the step emitted more behind it."""
    text = greedy(model, prompt(6), 20)
    for at in range(1, 9):
        ours, theirs = Recorder(), Recorder()
        common: dict[str, Any] = {"max_new_tokens": 20, "stopping_criteria": [Meets([text[at]])]}
        ids = torch.tensor([prompt(6)])
        make().generate(ids, streamer=ours, **common)
        model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, streamer=theirs, **common)
        assert ours.received == theirs.received
        assert ours.received[-1] == "end"


def test_a_streamer_is_given_the_padding_of_a_prompt_too(make: Make, model: LlamaForCausalLM) -> None:
    ids = torch.tensor([[PAD, PAD, *prompt(4)]])
    common: dict[str, Any] = {"attention_mask": (ids != PAD).long(), "max_new_tokens": 4, "pad_token_id": PAD}
    ours, theirs = Recorder(), Recorder()
    make().generate(ids, streamer=ours, **common)
    model.generate(ids, do_sample=False, streamer=theirs, **common)
    assert ours.received == theirs.received


def test_a_streamer_follows_one_continuation(make: Make) -> None:
    streamer = Recorder()
    with pytest.raises(InvalidInput, match="it can follow one row, and there are more"):
        make().generate(torch.tensor([[1, 2]]), num_return_sequences=2, streamer=streamer)
    with pytest.raises(InvalidInput, match="no methods put and end"):
        make().generate(torch.tensor([[1, 2]]), streamer=NoStreamer())
    assert streamer.received == []


def test_an_argument_that_generate_does_not_know(make: Make) -> None:
    with pytest.raises(UnknownOption, match=r"generate does not take temperature. It takes:.*num_return_sequences"):
        make().generate(torch.tensor([[1, 2]]), temperature=0.5)

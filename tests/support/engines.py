"""Engines over tiny models, for the tests of the engine: made cheaply, used from many threads, and looked at."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import re
import signal
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from transformers import LlamaForCausalLM

from speccompile import Speculator
from speccompile.compiler.build import build
from speccompile.compiler.options import WrapOptions
from speccompile.errors import RequestFailed
from speccompile.lowering.tier import Tier
from speccompile.runtime.engine import Engine
from speccompile.runtime.policy_controller import Policy
from speccompile.runtime.prefill import STEPS, PrefillBudget
from speccompile.runtime.request import Request
from support import tiny
from support.errors import assert_error, raises
from support.plans import planned
from support.recorder import Recorder

VOCAB = 128
PAD = 127
MAX_BATCH = 4
MAX_LEN = 128
#: Longer than any wait that is not a deadlock, on a machine that has much else to do too.
PATIENCE = 300

Make = Callable[..., Speculator]


def read_all(spec: Speculator, slot: int) -> None:
    """Let the drafter read what the target has read of the slot's text, as the engine does before its KV is copied."""
    catch_up = spec.engine.scheduler._unread
    for request in spec.engine.running:
        if catch_up is not None and request.slot == slot:
            catch_up.read_all(request)


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
        sizes["policy"] = f"fixed:{max((sizes | options)['tiers'])}"
        self.model = model
        self.plan = planned(model, mode, backend="eager", **sizes | options)
        self.build = build(model, self.plan.info, self.plan.config)
        # Made once, like the rest: what the first watched request makes belongs to the fingerprint.
        self.build.make_mixed(self.plan.config.kind)
        self.made: list[Engine] = []

    def make(self, policy: Policy | None = None, **options: Any) -> Speculator:
        """``options`` are those of the engine."""
        assert all(engine.idle for engine in self.made), "two would share the arena"
        policy = self.plan.policy if policy is None else policy
        spec = Speculator(self.model, self.build, policy, WrapOptions(**options), None, lambda *_: None)
        self.made.append(spec.engine)
        return spec

    def maker(self) -> Iterator[Make]:
        """For a fixture. What was made may leave nothing, nor move a buffer."""
        before = self.build.arena.fingerprint()
        yield self.make
        made, self.made = self.made, []
        for engine in made:
            engine.close()
            assert engine.idle and engine.capacity().free_slots == engine.capacity().slots
            assert engine.capacity().waiting == 0
        assert not self.build.arena["alive"].any()
        assert self.build.arena.fingerprint() == before


def always_mixes(spec: Speculator) -> None:
    """Prompts are read along with any tier, however the machine's speed moves meanwhile."""
    budget = spec.engine.prompts.budget
    for draft_len in spec.tiers:
        for _ in range(STEPS):
            PrefillBudget.note_step(budget, draft_len, 1e6)
    budget.note_step = lambda *_: None  # type: ignore[method-assign]


def prompt(length: int, seed: int = 0) -> list[int]:
    """Without the id that pads."""
    return tiny.random_prompt(length, seed, vocab=PAD)


def greedy(model: LlamaForCausalLM, prompt: list[int], new: int) -> list[int]:
    """transformers' own text, which is the same from test to test until an embedding is changed in place."""
    return list(_greedy(model, model.get_input_embeddings().weight._version, tuple(prompt), new))


@functools.cache
def _greedy(model: LlamaForCausalLM, version: int, prompt: tuple[int, ...], new: int) -> tuple[int, ...]:
    return tuple(tiny.greedy(model, list(prompt), new))


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


def admit_all(engine: Engine) -> None:
    """Step until no slot is free."""
    while engine.capacity().free_slots:
        engine.step()


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
            while not self.engine.loop.closed:
                time.sleep(0.001)


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


def neighbours(engine: Engine, new: int = 30) -> list[Request]:
    return [engine.submit(prompt(5, seed), max_new_tokens=new) for seed in (101, 102)]


def assert_exact(model: LlamaForCausalLM, requests: list[Request]) -> None:
    for request in requests:
        assert request.error is None
        assert request.new_tokens == greedy(model, request.prompt, request.params.max_new_tokens)


def assert_usable(engine: Engine, model: LlamaForCausalLM) -> None:
    """All slots, at once."""
    assert engine.idle and engine.capacity().free_slots == MAX_BATCH
    requests = [engine.submit(prompt(6, seed), max_new_tokens=12) for seed in range(MAX_BATCH + 1)]
    engine.run()
    assert_exact(model, requests)


def assert_failed(request: Request, kind: type[BaseException], message: str = "", **fields: Any) -> None:
    """``request`` ended with an error of exactly the class ``kind``: with this ``message``, if it is one of others, or
    with ``fields``, if it is one of the package's."""
    with raises(RequestFailed, reason=re.compile(f"^{kind.__name__}: {re.escape(message)}")) as caught:
        request.result()
    assert request.finish_reason == "error"
    assert_error(caught.value.__cause__, kind, **fields)


class Breaks(Recorder):
    """A streamer that raises when it gets its n-th value (the prompt is the first), or at the end."""

    def __init__(self, at: int | None, error: BaseException | None = None) -> None:
        super().__init__()
        self.at = at
        self.error = OSError("the pipe is closed") if error is None else error

    def put(self, value: torch.Tensor) -> None:
        super().put(value)
        if len(self.received) == self.at:
            raise self.error

    def end(self) -> None:
        super().end()
        if self.at is None:
            raise self.error


class NoStreamer:
    def put(self, value: torch.Tensor) -> None: ...


Fail = Callable[[Engine], bool]


def breaking(engine: Engine, tiers: dict[Any, Tier], error: BaseException, when: Fail, *, after: bool = False) -> None:
    """Makes executables of ``engine`` raise when ``when`` says so, before or after they have written."""
    for key, tier in tiers.items():

        def run(*tensors: torch.Tensor, executable: Any = tier.executable) -> None:
            if not after and when(engine):
                raise error
            executable(*tensors)
            if after and when(engine):
                raise error

        tiers[key] = replace(tier, executable=run)

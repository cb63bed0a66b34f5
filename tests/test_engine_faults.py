"""What goes wrong in one request, or in a whole step, and whom it concerns: nobody else, and nothing is left behind."""

from __future__ import annotations

import asyncio
import functools
import itertools
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from test_engine import (
    MAX_BATCH,
    PATIENCE,
    Bench,
    Calls,
    Make,
    admit_all,
    greedy,
    prompt,
    threads,
    time_limit,
)
from test_listener import Recorder
from tiny import tiny_llama
from transformers import LlamaForCausalLM

import speccompile.build as build_module
from speccompile import Speculator
from speccompile.errors import RequestFailed, UndecidedLogits, UnknownTier
from speccompile.graph_capture.observe import observe
from speccompile.lowering.tier import Tier
from speccompile.runtime.engine import Engine
from speccompile.runtime.policy import Fixed
from speccompile.runtime.request import Request


@pytest.fixture(autouse=True)
def limited() -> Iterator[None]:
    yield from time_limit()


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    return tiny_llama()


@pytest.fixture(scope="module")
def bench(model: LlamaForCausalLM) -> Bench:
    return Bench(model)


@pytest.fixture
def make(bench: Bench) -> Iterator[Make]:
    """Asserts behind each test that no slot is lost and that no buffer moved."""
    yield from bench.maker()


@pytest.fixture
def engine(make: Make) -> Engine:
    return make().engine


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


def assert_failed(request: Request, kind: type[BaseException], message: str | None = None) -> None:
    assert request.finish_reason == "error"
    with pytest.raises(RequestFailed, match=message) as caught:
        request.result()
    assert isinstance(caught.value.__cause__, kind)


# --- callbacks that raise ------------------------------------------------------------------------


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


# The prompt is put at admission, the first token behind prefill, the others behind steps of four tokens.
@pytest.mark.parametrize("at", [1, 2, 3, 5, 6, 9, 21])
def test_a_streamer_that_raises(engine: Engine, model: LlamaForCausalLM, at: int) -> None:
    others = neighbours(engine)
    streamer = Breaks(at)
    request = engine.submit(prompt(5), max_new_tokens=20, streamer=streamer)
    engine.run()
    assert_failed(request, OSError, "error of its own: OSError: the pipe is closed")
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
    # The streamer did nothing wrong: it is told of the end, or whoever reads from it would wait for ever.
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
        with pytest.raises(OSError, match="the pipe is closed"):
            spec.generate(torch.tensor([prompt(5)]), max_new_tokens=20, streamer=Breaks(at))
        assert spec.engine.idle
    assert_usable(spec.engine, model)


def test_async_readers_are_told_of_the_error(engine: Engine, model: LlamaForCausalLM) -> None:
    request = engine.submit(prompt(5), max_new_tokens=20, streamer=Breaks(6))
    (other,) = others = neighbours(engine)[:1]

    async def main() -> tuple[list[int], list[int]]:
        got: list[int] = []

        async def read() -> None:
            with pytest.raises(RequestFailed, match="the pipe is closed"):
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


# Not behind its last token: the end is what comes then.
@pytest.mark.parametrize("at", [1, 2, 3, 6, None])
@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit])
def test_an_interrupt_in_a_callback_goes_on_to_whoever_steps(
    engine: Engine, model: LlamaForCausalLM, at: int | None, kind: type[BaseException]
) -> None:
    """Ctrl-C while a streamer prints, say. The neighbours' tokens of that step are not lost."""
    before, request, after = (
        engine.submit(prompt(5, 101), max_new_tokens=30),
        engine.submit(prompt(5), max_new_tokens=20, streamer=Breaks(at, kind("stop"))),
        engine.submit(prompt(5, 102), max_new_tokens=30),
    )
    with pytest.raises(kind, match="stop"):
        engine.run()
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
    # Nobody wants its rows any more; others go on.
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
    """It serves no more; whoever waits steps then."""

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


# --- executables that raise ----------------------------------------------------------------------


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


def first_time() -> Fail:
    left = [True]
    return lambda engine: bool(left and left.pop())


def prefills(request: Request) -> Fail:
    """A chunk of its prompt is being read."""
    return lambda engine: not request.finished and int(engine.arena["prefill_slot"][0]) == request.slot


MEMORY = [MemoryError("no room"), torch.OutOfMemoryError("CUDA out of memory")]


@pytest.mark.parametrize("error", MEMORY, ids=["host", "device"])
@pytest.mark.parametrize("length", [5, 40])
@pytest.mark.parametrize("after", [False, True])
def test_a_prompt_that_finds_no_memory(
    engine: Engine, model: LlamaForCausalLM, error: Exception, length: int, after: bool
) -> None:
    """``after``: its chunk was computed, but the step did not come to its end. ``length`` 40 is two chunks."""
    others = neighbours(engine, new=60)
    for other in others:
        while not other.new_tokens:
            engine.step()
    request = engine.submit(prompt(length), max_new_tokens=20)
    breaking(engine, engine.prefill_tiers, error, prefills(request), after=after)
    waiting = [engine.submit(prompt(5, seed), max_new_tokens=10) for seed in range(110, 114)]
    engine.run()
    assert_failed(request, type(error), str(error))
    assert request.new_tokens == []
    assert_exact(model, [*others, *waiting])
    assert_usable(engine, model)


@pytest.mark.parametrize("error", MEMORY, ids=["host", "device"])
@pytest.mark.parametrize("what", ["reset_slot", "copy_text_state"])
def test_a_slot_that_cannot_be_written(
    engine: Engine, model: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch, error: Exception, what: str
) -> None:
    running = engine.submit(prompt(20), max_new_tokens=60)
    while not running.new_tokens:
        engine.step()
    failing, write = first_time(), getattr(engine.arena, what)

    def fails_once(*arguments: Any) -> None:
        if failing(engine):
            raise error
        write(*arguments)

    monkeypatch.setattr(engine.arena, what, fails_once)
    # It begins as the running one, whose KV is copied.
    request = engine.submit([*prompt(20), 7, 8], max_new_tokens=20)
    waiting = engine.submit(prompt(5, 1), max_new_tokens=20)
    engine.run()
    assert_failed(request, type(error), str(error))
    assert_exact(model, [running, waiting])
    assert_usable(engine, model)


def test_generate_without_memory_for_one_prompt(make: Make, model: LlamaForCausalLM) -> None:
    """What the caller gets is the error itself, and no row stays."""
    spec = make()
    others = neighbours(spec.engine)
    admitted = [0]

    def third(engine: Engine) -> bool:
        admitted[0] += 1
        return admitted[0] == 4

    breaking(spec.engine, spec.engine.prefill_tiers, MemoryError("no room"), third)
    with pytest.raises(MemoryError, match="no room"):
        spec.generate(torch.tensor([prompt(5, seed) for seed in range(2)]), max_new_tokens=20)
    spec.engine.run()
    assert_exact(model, others)
    assert_usable(spec.engine, model)


@pytest.mark.parametrize("after", [False, True])
def test_a_tier_that_raises_fails_all_in_it_and_nobody_who_waits(
    engine: Engine, model: LlamaForCausalLM, after: bool
) -> None:
    error = RuntimeError("a kernel failed")
    recorders = [Recorder() for _ in range(MAX_BATCH)]
    running = [engine.submit(prompt(5, seed), max_new_tokens=30, streamer=recorders[seed]) for seed in range(MAX_BATCH)]
    admit_all(engine)
    while any(not request.new_tokens for request in running):
        engine.step()
    waiting = [engine.submit(prompt(5, seed), max_new_tokens=12) for seed in range(10, 16)]
    breaking(engine, engine.tiers, error, first_time(), after=after)
    engine.run()
    for seed, request in enumerate(running):
        assert_failed(request, RuntimeError, "error of its own: RuntimeError: a kernel failed")
        assert request.error is error
        # What came before that is what it would be.
        assert request.new_tokens == greedy(model, prompt(5, seed), len(request.new_tokens)) != []
        assert recorders[seed].received[-1] == "end"
    assert_exact(model, waiting)
    assert_usable(engine, model)


def test_everybody_who_waits_for_a_failed_step_is_told(engine: Engine) -> None:
    requests = [engine.submit(prompt(5, seed), max_new_tokens=30) for seed in range(3)]
    while any(not request.new_tokens for request in requests):
        engine.step()
    breaking(engine, engine.tiers, RuntimeError("a kernel failed"), first_time())
    told: list[BaseException] = []

    def wait(request: Request) -> None:
        with pytest.raises(RequestFailed, match="a kernel failed") as caught:
            request.result()
        told.append(caught.value)

    with threads(*[lambda request=request: wait(request) for request in requests]):
        pass
    # Each in an error of its own, of which one cause is that of all.
    assert len({id(error) for error in told}) == 3 and len({id(error.__cause__) for error in told}) == 1


class Policies:
    class Raises:
        def choose(self, live_rows: int) -> int:
            raise LookupError("no schedule for so many rows")

    class Unbuilt:
        def choose(self, live_rows: int) -> int:
            return 2

    class NoNumber:
        def choose(self, live_rows: int) -> Any:
            return None


@pytest.mark.parametrize(
    ("policy", "kind", "message"),
    [
        (Policies.Raises(), LookupError, "no schedule for so many rows"),
        (Policies.Unbuilt(), UnknownTier, "no tier with draft length 2 was built; built: 0, 3"),
        (Policies.NoNumber(), UnknownTier, "no tier with draft length None"),
    ],
)
def test_a_policy_that_cannot_choose(
    make: Make, model: LlamaForCausalLM, policy: Any, kind: type[Exception], message: str
) -> None:
    spec = make(policy=policy)
    requests = neighbours(spec.engine)
    spec.engine.run()
    for request in requests:
        assert_failed(request, kind, message)
    with pytest.raises(kind, match=message):
        spec.generate(torch.tensor([prompt(5)]), max_new_tokens=20)
    spec.set_tier(3)
    assert_usable(spec.engine, model)


@pytest.mark.parametrize("where", ["a tier", "a prompt", "the policy"])
def test_an_interrupt_in_a_step_goes_on_to_the_caller_and_leaves_a_usable_engine(
    make: Make, model: LlamaForCausalLM, where: str
) -> None:
    class Interrupts(Fixed):
        def choose(self, live_rows: int) -> int:
            if where == "the policy" and first(engine):
                raise KeyboardInterrupt
            return 3

    first = first_time()
    engine = make(policy=Interrupts(3)).engine
    running = neighbours(engine)
    if where != "a prompt":
        admitted = [engine.submit(prompt(5, seed), max_new_tokens=30) for seed in (103, 104)]
        while where == "a tier" and any(not request.new_tokens for request in [*running, *admitted]):
            engine.step()
        running += admitted
    waiting = [engine.submit(prompt(5, seed), max_new_tokens=10) for seed in range(3)]
    if where == "a tier":
        breaking(engine, engine.tiers, KeyboardInterrupt(), first)
    elif where == "a prompt":
        breaking(engine, engine.prefill_tiers, KeyboardInterrupt(), first)
    with pytest.raises(KeyboardInterrupt):
        engine.run()
    failed = [request for request in running if request.finished]
    assert failed
    for request in failed:
        assert_failed(request, RuntimeError, "interrupted by KeyboardInterrupt")
    engine.run()
    assert_exact(model, [request for request in [*running, *waiting] if request not in failed])
    if where == "a prompt":
        assert failed == running[:1], "nobody else was concerned"
    assert_usable(engine, model)


def test_an_interrupt_comes_to_whoever_waits_for_a_result(engine: Engine, model: LlamaForCausalLM) -> None:
    request = engine.submit(prompt(5), max_new_tokens=20)
    breaking(engine, engine.tiers, KeyboardInterrupt(), first_time())
    with pytest.raises(KeyboardInterrupt):
        request.result()
    assert_usable(engine, model)


# --- NaN -----------------------------------------------------------------------------------------


class Poisoned(Bench):
    """Its model knows a token whose embedding is NaN, and has a text in which that token comes in the middle.

    Args:
        kind: what attention does with places that a text has not reached, or how drafts are made.
    """

    def __init__(self, kind: str) -> None:
        # Sizes of its own, since the store would have the capture of another.
        model = tiny_llama(seed=3, hidden=32 if kind == "eager attention" else 64)
        with pytest.MonkeyPatch.context() as patch:
            if kind == "eager attention":
                patch.setattr(build_module, "observe", lambda model, info, routes: observe(model, info, ("eager",)))
            mode = "ngram" if kind == "ngram" else "early_exit"
            super().__init__(model, mode, deterministic=kind == "deterministic", max_len=64)
        assert self.build.observed.route == ("eager" if kind == "eager attention" else "attention")
        self.text = prompt(4, 1)
        new = greedy(model, self.text, 12)
        self.place = next(place for place in range(3, 12) if new[place] not in [*self.text, *new[:place]])
        self.bad = new[self.place]
        # Behind the build: the capture check would meet the token. Changes in place are used at once.
        with torch.no_grad():
            model.model.embed_tokens.weight[self.bad] = float("nan")

    def healthy(self, length: int, seed: int) -> list[int]:
        """A prompt without the bad token."""
        return [token if token != self.bad else self.bad - 1 for token in prompt(length, seed)]

    def harmless(self, count: int, new: int, seed: int) -> list[list[int]]:
        """Prompts whose texts have no bad token."""
        prompts = (self.healthy(5, number) for number in itertools.count(seed))
        return list(itertools.islice((p for p in prompts if self.bad not in greedy(self.model, p, new)), count))


@pytest.fixture(scope="module")
def all_poisoned() -> Callable[[str], Poisoned]:
    return functools.cache(Poisoned)


@pytest.fixture(params=["attention", "ngram", "eager attention", "deterministic"])
def poisoned(request: pytest.FixtureRequest, all_poisoned: Callable[[str], Poisoned]) -> Poisoned:
    return all_poisoned(request.param)


@pytest.fixture
def bad(poisoned: Poisoned) -> Iterator[Make]:
    yield from poisoned.maker()


def assert_clean(engine: Engine) -> None:
    for name, tensor in engine.arena.items():
        if tensor.is_floating_point():
            assert not tensor[:MAX_BATCH].isnan().any(), name


def beside(engine: Engine, poisoned: Poisoned) -> list[Request]:
    """Neighbours whose own texts are healthy, with their first token."""
    requests = [engine.submit(text, max_new_tokens=30) for text in poisoned.harmless(2, 30, seed=20)]
    while any(not request.new_tokens for request in requests):
        engine.step()
    return requests


def assert_undecided(request: Request, behind: int) -> None:
    assert_failed(request, UndecidedLogits, f"the model's logits behind token {behind} of the text are NaN")


def assert_next_ones_exact(engine: Engine, poisoned: Poisoned) -> None:
    """Everybody who has any of the slots next."""
    texts = poisoned.harmless(MAX_BATCH + 1, 12, seed=60)
    requests = [engine.submit(text, max_new_tokens=12) for text in texts]
    engine.run()
    assert_exact(poisoned.model, requests)


@pytest.mark.parametrize("place", [0, 4, 20, 39])
def test_a_prompt_with_nan(bad: Make, poisoned: Poisoned, place: int) -> None:
    """In the first chunk or in the last, first or last token."""
    engine = bad().engine
    others = beside(engine, poisoned)
    text = poisoned.healthy(40, 7)
    text[place] = poisoned.bad
    request = engine.submit(text, max_new_tokens=20)
    engine.run()
    assert_undecided(request, 40)
    assert request.new_tokens == []
    assert_exact(poisoned.model, others)
    assert_clean(engine)
    assert_next_ones_exact(engine, poisoned)


@pytest.mark.parametrize("draft_len", [0, 3])
def test_nan_in_the_middle_of_a_text(bad: Make, poisoned: Poisoned, draft_len: int) -> None:
    """The bad token is the last that can be chosen, at every draft length."""
    engine = bad(policy=Fixed(draft_len)).engine
    text, place = poisoned.text, poisoned.place
    others, streamer = beside(engine, poisoned), Recorder()
    request = engine.submit(text, max_new_tokens=20, streamer=streamer)
    engine.run()
    assert request.new_tokens == greedy(poisoned.model, text, 20)[: place + 1]
    assert request.new_tokens[-1] == poisoned.bad
    assert_undecided(request, len(text) + place + 1)
    assert streamer.received[-1] == "end" and len(streamer.received) == 1 + place + 1 + 1
    assert_exact(poisoned.model, others)
    assert_clean(engine)
    assert_next_ones_exact(engine, poisoned)


def test_generate_raises_undecided_logits(bad: Make, poisoned: Poisoned) -> None:
    spec = bad()
    ids = torch.tensor([poisoned.harmless(1, 20, seed=90)[0], [1, 2, 3, poisoned.bad, 4]])
    with pytest.raises(UndecidedLogits, match=r"behind token 5 of the text are NaN.*load it in float32"):
        spec.generate(ids, max_new_tokens=20)
    assert spec.engine.idle
    assert_clean(spec.engine)


def test_a_text_may_end_with_the_bad_token(bad: Make, poisoned: Poisoned) -> None:
    """Nothing is to be chosen behind it, so nothing is undecided; nor does it leave anything behind."""
    engine = bad().engine
    request = engine.submit(poisoned.text, max_new_tokens=poisoned.place + 1)
    eos = engine.submit(poisoned.text, max_new_tokens=30, eos_token_id=poisoned.bad)
    engine.run()
    assert request.new_tokens == eos.new_tokens and request.new_tokens[-1] == poisoned.bad
    assert (request.finish_reason, eos.finish_reason) == ("max_new_tokens", "eos")
    assert_next_ones_exact(engine, poisoned)


@pytest.mark.parametrize("when", ["its prompt is read", "its last chunk is read", "its token is handed out"])
@pytest.mark.parametrize("late", [False, True])
def test_one_that_is_cancelled_before_anybody_saw_its_nan(bad: Make, poisoned: Poisoned, when: str, late: bool) -> None:
    """It ends without an error, and yet nothing of it may reach the next owner of its slot."""
    engine = bad().engine
    engine.late = late
    if when == "its prompt is read":
        request = engine.submit([poisoned.bad, *poisoned.healthy(39, 7)], max_new_tokens=5)
        engine.step()
        assert request.slot >= 0 and not request.new_tokens
        request.cancel()
    elif when == "its last chunk is read":
        request = engine.submit([1, poisoned.bad], max_new_tokens=5)

        def cancel(engine: Engine) -> bool:
            request.cancel()
            return False

        breaking(engine, engine.prefill_tiers, RuntimeError(), cancel, after=True)
        engine.run()
    else:
        streamer = Calls(lambda: request.cancel(), at=2 + poisoned.place)
        request = engine.submit(poisoned.text, max_new_tokens=30, streamer=streamer)
        engine.run()
    assert request.finish_reason == "cancelled"
    assert_next_ones_exact(engine, poisoned)


def test_a_rejected_draft_with_nan_concerns_nobody(model: LlamaForCausalLM) -> None:
    """Drafts of one layer are often wrong: a bad token among them may not end a text that never has it."""
    model = tiny_llama()
    spec = Bench(model, exit_layer=1, max_len=64).make()
    text = [1, 2, 3]
    expected = greedy(model, text, 12)
    embedding = model.model.embed_tokens.weight
    drafted = 0
    for token in [token for token in range(30, 70) if token not in [*expected, *text]]:
        kept = embedding[token].detach().clone()
        with torch.no_grad():
            embedding[token] = float("nan")
        spec.stats.reset()
        request = spec.engine.submit(text, max_new_tokens=12)
        spec.engine.run()
        assert request.error is None and request.new_tokens == expected, token
        # A step that had to be done again, without drafts.
        drafted += 0 in spec.stats.tier_steps
        with torch.no_grad():
            embedding[token] = kept
    assert drafted > 3, "bad tokens were drafted"


def test_a_failed_request_leaves_no_known_beginning(bad: Make, poisoned: Poisoned) -> None:
    """The same prompt again is read from its first token on."""
    engine = bad().engine
    text = [*poisoned.healthy(20, 7), poisoned.bad, *poisoned.healthy(10, 8)]
    for _ in range(2):
        request = engine.submit(text, max_new_tokens=5)
        engine.run()
        assert_undecided(request, 31)
        assert request.stats.reused_tokens == 0


# --- late results --------------------------------------------------------------------------------


def test_faults_where_results_are_read_a_step_late(make: Make, model: LlamaForCausalLM) -> None:
    """As on a GPU: a step is under way when what went wrong in the one before is seen."""
    spec: Speculator = make()
    engine = spec.engine
    engine.late = True
    others = neighbours(engine)
    streamers = [Breaks(2), Breaks(7), Breaks(None)]
    requests = [engine.submit(prompt(5, seed), max_new_tokens=20, streamer=s) for seed, s in enumerate(streamers)]
    heard = Recorder()
    ended = engine.submit(prompt(5, 9), max_new_tokens=6, streamer=heard)
    engine.run()
    assert all(isinstance(request.error, OSError) for request in requests)
    assert_exact(model, [*others, ended])
    assert heard.received.count("end") == 1
    breaking(engine, engine.tiers, RuntimeError("a kernel failed"), first_time())
    failing = neighbours(engine)
    engine.run()
    assert all(isinstance(request.error, RuntimeError) for request in failing)
    assert_usable(engine, model)

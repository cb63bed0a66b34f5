"""Logits that are NaN end one request, and leave nothing."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator

import pytest
import torch
from transformers import LlamaForCausalLM

import speccompile.compiler.frontend as stages_module
from speccompile.errors import UndecidedLogits
from speccompile.graph_capture.observe import observe
from speccompile.runtime.engine import Engine
from speccompile.runtime.policy_controller import Fixed
from speccompile.runtime.request import Request
from support.engines import MAX_BATCH, Bench, Calls, Make, assert_exact, assert_failed, breaking, greedy, prompt
from support.errors import raises
from support.recorder import Recorder
from support.tiny import tiny_llama


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
                patch.setattr(stages_module, "observe", lambda model, info, routes: observe(model, info, ("eager",)))
            mode = "ngram" if kind == "ngram" else "early_exit"
            super().__init__(model, mode, deterministic=kind == "deterministic", max_len=64)
        assert self.build.observed.route == ("eager" if kind == "eager attention" else "attention")
        self.text = prompt(4, 1)
        new = greedy(model, self.text, 12)
        self.place = next(place for place in range(3, 12) if new[place] not in [*self.text, *new[:place]])
        self.bad = new[self.place]
        # After the build: the capture check would meet the token. Changes in place are used at once.
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


def assert_undecided(request: Request, position: int) -> None:
    assert_failed(request, UndecidedLogits, position=position)


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


@pytest.mark.parametrize("cancelled", [False, True])
def test_the_beginning_of_a_prompt_with_nan_is_not_reused(bad: Make, poisoned: Poisoned, cancelled: bool) -> None:
    """Its tokens before the bad one may be spoiled, too. A prompt that follows comes before the error, or after it was
    cancelled."""
    engine = (bad(prefill_budget=16) if cancelled else bad()).engine
    others = beside(engine, poisoned)[: 1 if cancelled else 2]
    (good,) = poisoned.harmless(1, 12, seed=80)
    begins = poisoned.healthy(6, 9)
    request = engine.submit([*begins, poisoned.bad, *poisoned.healthy(30 if cancelled else 5, 10)], max_new_tokens=20)
    if cancelled:
        while not 7 < request.cached < len(request.prompt):
            engine.step()
        request.cancel()
    follower = engine.submit([*begins, *good], max_new_tokens=12)
    engine.run()
    assert_exact(poisoned.model, [*others, follower])
    assert_clean(engine)


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
    with raises(UndecidedLogits, position=5):
        spec.generate(ids, max_new_tokens=20)
    assert spec.engine.idle
    assert_clean(spec.engine)


def test_a_text_may_end_with_the_bad_token(bad: Make, poisoned: Poisoned) -> None:
    """Nothing is to be chosen after it, so nothing is undecided; nor does it leave anything."""
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
    engine.scheduler.late = late
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

"""What submit takes and refuses, and who waits for whom."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from speccompile.errors import (
    EmptyPrompt,
    InvalidInput,
    InvalidOption,
    ModelChanged,
    ModelInTraining,
    PromptTooLong,
    QueueFull,
    SpecCompileError,
    TokenOutOfVocabulary,
    TooManyEosTokens,
    UnknownOption,
    WeightsReplaced,
)
from speccompile.runtime.engine import Engine
from speccompile.runtime.request_submitter import Capacity
from support.engines import (
    MAX_BATCH,
    MAX_LEN,
    VOCAB,
    Make,
    NoStreamer,
    admit_all,
    assert_unchanged,
    greedy,
    prompt,
    snapshot,
)
from support.errors import raises
from support.recorder import Recorder


def invalid(name: str, *values: Any) -> list[tuple[dict[str, Any], type[SpecCompileError], dict[str, Any]]]:
    """Cases of one option that is not valid with any of these ``values``."""
    return [({name: value}, InvalidOption, {"where": "submit", "name": name}) for value in values]


NO_PROMPTS = (
    *([1.5], [True], "text", None, [[1], [2]], [[1, 2], [3]], [2**70], {1: 2}),
    *(torch.zeros(2, 3, dtype=torch.int64), torch.zeros(1, 1, 3, dtype=torch.int64), torch.zeros(3, dtype=torch.int16)),
)
NO_STREAMER = {"name": "streamer"}
NO_TEXT = {"name": "stop", "reason": re.compile("must be a text or a list of texts")}
NO_CRITERION = {"name": "stopping_criteria", "reason": re.compile("it cannot be called")}
OUTSIDE = {"name": "eos_token_id", "reason": re.compile(r"not a token id \(0 \.\. 127\); use \[\] for none")}
BAD: list[tuple[dict[str, Any], type[SpecCompileError], dict[str, Any]]] = [
    ({"top_h": 0.5, "num_beams": 2}, UnknownOption, {"where": "submit", "names": "num_beams, top_h"}),
    ({"ids": []}, EmptyPrompt, {"row": 0}),
    ({"ids": torch.empty(1, 0, dtype=torch.int64)}, EmptyPrompt, {"row": 0}),
    ({"ids": [1] * MAX_LEN}, PromptTooLong, {"length": 128, "max_len": 128, "allowed": 127}),
    *[({"ids": ids}, InvalidInput, {"name": "prompt 0"}) for ids in NO_PROMPTS],
    ({"ids": [1, -1]}, TokenOutOfVocabulary, {"token": -1, "last": 127}),
    ({"ids": [VOCAB]}, TokenOutOfVocabulary, {"token": 128, "last": 127, "vocab": 128}),
    *invalid("max_new_tokens", 0, -1, 1.0, True, "3"),
    *invalid("seed", -1, 2**63, 1.0, True, "1"),
    *invalid("priority", 2**63, -(2**63) - 1, None, 1.5, True),
    *[({"streamer": streamer}, InvalidInput, NO_STREAMER) for streamer in (NoStreamer(), [], print)],
    ({"stop": "a"}, InvalidInput, {"name": "stop", "reason": re.compile("stop strings need tokenizer=")}),
    *[({"stop": stop, "tokenizer": ...}, InvalidInput, NO_TEXT) for stop in ("", [], ["a", ""], [1], 5)],
    *[({"stopping_criteria": given}, InvalidInput, NO_CRITERION) for given in (5, [print, 5])],
    ({"eos_token_id": list(range(9))}, TooManyEosTokens, {"count": 9, "capacity": 8}),
    *[({"eos_token_id": eos}, InvalidInput, {"name": "eos_token_id"}) for eos in ("x", 1.5, True, [1, None])],
    *[({"eos_token_id": eos}, InvalidInput, OUTSIDE) for eos in (-1, [0, VOCAB])],
]


@pytest.mark.parametrize(("arguments", "error", "fields"), BAD, ids=[str(case[0])[:40] for case in BAD])
def test_a_bad_argument_is_refused_and_leaves_the_engine_as_it_was(
    engine: Engine,
    letters: PreTrainedTokenizerFast,
    arguments: dict[str, Any],
    error: type[SpecCompileError],
    fields: dict[str, Any],
) -> None:
    if "tokenizer" in arguments:
        arguments = arguments | {"tokenizer": letters}
    streamer = Recorder()
    before = snapshot(engine)
    with raises(error, **fields):
        engine.submit(**{"ids": [1, 2, 3], "streamer": streamer} | arguments)
    assert_unchanged(engine, before)
    assert streamer.received == []


def test_ends_that_the_vocabulary_has_not_are_none_where_the_model_says_them(
    engine: Engine, model: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As transformers has it, they never come."""
    monkeypatch.setattr(model.generation_config, "eos_token_id", [VOCAB, 7, -1])
    assert engine.submit(prompt(5)).params.eos == (7,)


@pytest.mark.parametrize(
    ("said", "count"),
    [({}, 128), ({"max_new_tokens": 4}, 4), ({"max_length": 9}, 4), ({"max_new_tokens": 3, "max_length": 50}, 3)],
)
def test_how_many_tokens_the_model_says(
    engine: Engine, model: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch, said: dict[str, int], count: int
) -> None:
    for name, value in said.items():
        monkeypatch.setattr(model.generation_config, name, value)
    assert engine.submit(prompt(5)).params.max_new_tokens == count
    assert engine.submit(prompt(5), max_new_tokens=2).params.max_new_tokens == 2


def test_a_prompt_that_is_longer_than_the_model_says(
    engine: Engine, model: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model.generation_config, "max_length", 5)
    with raises(
        InvalidOption, name="max_length", reason=re.compile("the prompt already has 5 tokens; give max_new_tokens")
    ):
        engine.submit(prompt(5))


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
        with raises(ModelInTraining, model="LlamaForCausalLM"):
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
        with raises(WeightsReplaced, path="lm_head.weight"):
            engine.submit([1, 2])
        assert_unchanged(engine, before)
    finally:
        model.lm_head.weight = head
    assert issubclass(WeightsReplaced, ModelChanged)
    assert engine.submit([1, 2], max_new_tokens=1).result().token_ids


# --- capacity and the waiting queue --------------------------------------------------------------


def test_capacity_counts_slots_and_room(make: Make) -> None:
    engine = make(max_waiting=3).engine
    assert engine.capacity() == Capacity(slots=4, free_slots=4, waiting=0, free_waiting=7)
    requests = [engine.submit(prompt(3, seed), max_new_tokens=100) for seed in range(6)]
    # No request has a slot before the first step, and the four free ones are promised to waiting requests.
    assert engine.capacity() == Capacity(slots=4, free_slots=4, waiting=6, free_waiting=1)
    admit_all(engine)
    assert engine.capacity() == Capacity(slots=4, free_slots=0, waiting=2, free_waiting=1)
    requests[0].cancel()
    assert engine.capacity() == Capacity(slots=4, free_slots=1, waiting=2, free_waiting=2)
    requests[5].cancel()
    assert engine.capacity() == Capacity(slots=4, free_slots=1, waiting=1, free_waiting=3)
    engine.run()
    assert engine.capacity() == Capacity(slots=4, free_slots=4, waiting=0, free_waiting=7)


@pytest.mark.parametrize("limit", [0, 2])
def test_a_full_queue_refuses_and_changes_nothing(make: Make, limit: int) -> None:
    engine = make(max_waiting=limit).engine
    first = [engine.submit(prompt(3, seed), max_new_tokens=100) for seed in range(MAX_BATCH + limit)]
    before = snapshot(engine)
    with raises(QueueFull, count=1, waiting=MAX_BATCH + limit, limit=limit):
        engine.submit([1])
    assert_unchanged(engine, before)
    admit_all(engine)
    # All slots are taken now, and as many wait as may.
    with raises(QueueFull, count=1, waiting=limit, limit=limit):
        engine.submit([1])
    first[-1].cancel()
    assert engine.capacity().free_waiting == 1
    assert engine.submit([1], max_new_tokens=2).result().finish_reason == "max_new_tokens"


def test_a_batch_has_room_or_has_not(make: Make) -> None:
    spec = make(max_waiting=0)
    ids = torch.tensor([prompt(5, seed) for seed in range(MAX_BATCH)])
    spec.engine.submit([1, 2], max_new_tokens=100)
    spec.engine.step()
    with raises(QueueFull, count=4, waiting=0):
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

"""``prefix_allowed_tokens_fn``: transformers' own text, and errors that reach the request they belong to."""

from __future__ import annotations

import re
import string
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import decoders
from transformers import LlamaForCausalLM

from speccompile import Speculator, wrap
from speccompile.errors import InvalidInput, InvalidOption
from speccompile.guides import regex_guide
from speccompile.runtime.engine import Engine
from support.engines import assert_failed
from support.errors import raises
from support.guide_tokenizers import word_level
from support.tiny import tiny_llama

VOCAB = 128
NEW = 24
MODES: dict[str, dict[str, Any]] = {"none": {}, "ngram": {}, "early_exit": {"exit_layer": 1}}
PROMPTS = [[5, 6, 7, 5, 6, 7], [9, 8, 9, 8, 9, 8], [1, 2, 3, 4, 5, 6], [3, 3, 3, 3, 3, 3]]


@cache
def model() -> LlamaForCausalLM:
    return tiny_llama(vocab=VOCAB)


@cache
def spec_of(mode: str) -> Speculator:
    tiers = (0,) if mode == "none" else (0, 3)
    return wrap(model(), mode, tiers=tiers, max_batch=4, max_len=63, backend="eager", **MODES[mode])


def near(row: int, text: torch.Tensor) -> list[int]:
    """Depends on the row, on the last token, and on how long the text is."""
    start = (int(text[-1]) * 7 + 11 * row + len(text)) % VOCAB
    return [(start + step) % VOCAB for step in range(0, 30, 3)]


@pytest.mark.parametrize("copies", [1, 2])
@pytest.mark.parametrize("mode", MODES)
def test_generate_gives_transformers_text(mode: str, copies: int) -> None:
    ids = torch.tensor(PROMPTS)
    options: dict[str, Any] = {
        "max_new_tokens": NEW,
        "prefix_allowed_tokens_fn": near,
        "eos_token_id": [7],
        "pad_token_id": 0,
    }
    if copies > 1:
        # At so low a temperature both draw the greatest.
        options |= {"num_return_sequences": copies, "do_sample": True, "temperature": 1e-4, "top_k": 0}
    with torch.random.fork_rng():
        expected = model().generate(ids, attention_mask=torch.ones_like(ids), **options)
    spec = spec_of(mode)
    for draft_len in spec.engine.draft_lens:
        spec.set_tier(draft_len)
        assert torch.equal(spec.generate(ids, **options), expected)


@pytest.mark.parametrize("mode", MODES)
def test_neighbours_get_what_they_get_alone(mode: str) -> None:
    spec = spec_of(mode)
    spec.set_tier(max(spec.engine.draft_lens))
    engine = spec.engine
    free = [{"ids": prompt, "max_new_tokens": NEW, "do_sample": True, "seed": 4} for prompt in PROMPTS[:3]]
    alone = [engine.submit(**request).result().token_ids for request in free]
    asking = {"ids": PROMPTS[3], "max_new_tokens": NEW, "prefix_allowed_tokens_fn": near}
    text = engine.submit(**asking).result().token_ids
    for place in range(3):
        submitted = [engine.submit(**request) for request in free]
        submitted.insert(place, engine.submit(**asking))
        assert [request.result().token_ids for request in submitted] == [*alone[:place], text, *alone[place:]]
    assert spec.arena["allowed_tokens"].all() and not spec.arena["asks_host"].any()


def test_it_is_asked_once_for_each_token_with_the_text_so_far() -> None:
    calls: list[tuple[int, list[int]]] = []

    def note(row: int, text: torch.Tensor) -> list[int]:
        assert text.dtype == torch.int64
        calls.append((row, text.tolist()))
        return near(row, text)

    # Of several chunks, and then known but for its last token.
    prompt = list(range(1, 40))
    with wrap(model(), "ngram", tiers=(0, 3), max_len=64, backend="eager", policy="fixed:3", prefill_budget=4) as spec:
        for _ in range(2):
            calls.clear()
            request = spec.engine.submit(prompt, max_new_tokens=6, prefix_allowed_tokens_fn=note)
            text = request.result().token_ids
            assert calls == [(0, prompt + text[:count]) for count in range(6)]
            assert all(token in near(0, torch.tensor(prompt + text[:place])) for place, token in enumerate(text))
        assert request.stats.reused_tokens == len(prompt) - 1


def test_what_may_be_returned() -> None:
    """Also an object that counts as False."""

    class Empty(list[int]):
        def __call__(self, row: int, text: torch.Tensor) -> Any:
            return {20, 21}

    engine = spec_of("ngram").engine
    functions: list[Callable[[int, torch.Tensor], Any]] = [
        lambda *_: [20, 21],
        lambda *_: range(20, 22),
        lambda *_: torch.tensor([20, 21]),
        lambda *_: [np.int64(20), torch.tensor(21)],
        lambda *_: np.array([20, 21]),
        lambda *_: iter([21, 20, 20]),
        Empty(),
    ]
    texts = [engine.submit([3, 4], max_new_tokens=8, prefix_allowed_tokens_fn=f).result().token_ids for f in functions]
    assert set(texts[0]) <= {20, 21}
    assert all(text == texts[0] for text in texts)


def fail(*_: Any) -> list[int]:
    raise ZeroDivisionError("what a pity")


FAULTS: list[tuple[Callable[..., Any], type[Exception], dict[str, Any]]] = [
    (fail, ZeroDivisionError, {}),
    *[
        (function, InvalidInput, {"name": "prefix_allowed_tokens_fn", "reason": re.compile(reason)})
        for function, reason in (
            (lambda *_: [], "it must return at least one token id, got none"),
            (lambda *_: None, "it must return a list of token ids, got None"),
            (lambda *_: 5, "it must return a list of token ids, got 5"),
            (lambda *_: [1, VOCAB], r"it must return token ids: 128 is not a token id \(0 \.\. 127\)"),
            (lambda *_: [-1], r"-1 is not a token id \(0 \.\. 127\)"),
            (lambda *_: [1.5], "1.5 is not a token id"),
            (lambda *_: torch.tensor([[1]]), r"\[1\] is not a token id"),
        )
    ],
]


@pytest.mark.parametrize(("function", "kind", "fields"), FAULTS)
@pytest.mark.parametrize("after", [0, 3])
def test_what_goes_wrong_ends_that_request_alone(
    function: Callable[..., Any], kind: type[Exception], fields: dict[str, Any], after: int
) -> None:
    """For the first token, or for a later one."""
    engine = spec_of("ngram").engine
    prompt = PROMPTS[0]
    expected = engine.submit(PROMPTS[1], max_new_tokens=NEW).result().token_ids

    def sometimes(row: int, text: torch.Tensor) -> Any:
        return near(row, text) if len(text) < len(prompt) + after else function()

    other = engine.submit(PROMPTS[1], max_new_tokens=NEW)
    bad = engine.submit(prompt, max_new_tokens=NEW, prefix_allowed_tokens_fn=sometimes)
    assert other.result().token_ids == expected
    assert_failed(bad, kind, **fields)
    assert len(bad.new_tokens) == after
    assert engine.idle and engine.capacity().free_slots == engine.capacity().slots


def test_prefix_allowed_tokens_fn_must_be_a_function() -> None:
    with raises(
        InvalidOption,
        name="prefix_allowed_tokens_fn",
        reason=re.compile(r"it must be a function \(batch_id, input_ids\) -> token ids"),
    ):
        spec_of("ngram").engine.submit([1], prefix_allowed_tokens_fn=[1, 2])


@pytest.mark.parametrize("after", [0, 3])
def test_it_may_cancel_its_own_request_or_another(after: int) -> None:
    engine: Engine = spec_of("ngram").engine
    other = engine.submit(PROMPTS[1], max_new_tokens=NEW)
    mine: list[Any] = []

    def cancels(row: int, text: torch.Tensor) -> list[int]:
        if len(text) == len(PROMPTS[0]) + after:
            other.cancel()
            mine[0].cancel()
        return near(row, text)

    mine.append(engine.submit(PROMPTS[0], max_new_tokens=NEW, prefix_allowed_tokens_fn=cancels))
    engine.run()
    assert mine[0].finish_reason == other.finish_reason == "cancelled"
    assert len(mine[0].new_tokens) == after
    assert engine.capacity().free_slots == engine.capacity().slots


def test_beside_a_guide_both_hold() -> None:
    # Tokens 1, 2, ... are these letters.
    guide = regex_guide("[t-zA-C]+", word_level(decoders.Metaspace(), tuple(string.ascii_letters)))
    engine = spec_of("ngram").engine
    options: dict[str, Any] = {"guide": guide, "eos_token_id": [0], "max_new_tokens": 8}
    text = engine.submit([3], **options, prefix_allowed_tokens_fn=lambda *_: range(25, 99)).result().token_ids
    assert len(text) == 8 and set(text) <= set(range(25, 30))


def test_an_interrupt_in_the_function_ends_its_request_and_reaches_the_thread_that_steps() -> None:
    def interrupted(row: int, text: torch.Tensor) -> list[int]:
        raise KeyboardInterrupt

    engine = spec_of("ngram").engine
    request, other = engine.submit([1, 2], prefix_allowed_tokens_fn=interrupted), engine.submit([3], max_new_tokens=3)
    with pytest.raises(KeyboardInterrupt):
        engine.run()
    engine.run()
    assert request.finish_reason == "error" and len(other.new_tokens) == 3

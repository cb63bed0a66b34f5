"""Guides where steps cannot call the host, as on CUDA: the host writes masks before each step, and looks at the drafts
that wait for it.

The texts are those of guides that are followed inside the steps.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

from speccompile import Speculator, wrap
from speccompile.errors import InvalidGuide, RequestFailed, UndecidedLogits
from speccompile.guides import Guide, grammar_guide, json_schema_guide, regex_guide
from support.errors import raises
from support.guide_tokenizers import EOS, common
from support.tiny import tiny_llama

#: More than the tokenizer has.
VOCAB, NEW = 300, 32
Request = dict[str, Any]


def last_tokens(tokens: list[int], draft_len: int) -> list[int]:
    return tokens[-draft_len:]


#: Drafters whose drafts wait for a step, and one that computes them within it.
MODES: dict[str, dict[str, Any]] = {
    "none": {"mode": "none"},
    "ngram": {"mode": "ngram"},
    "lookups": {"mode": ["prediction", "suffix"]},
    "host": {"mode": "user_provided", "draft": last_tokens, "host": True},
    "early_exit": {"mode": "early_exit", "exit_layer": 1},
}


@cache
def model() -> LlamaForCausalLM:
    return tiny_llama(vocab=VOCAB)


@cache
def guides() -> list[Guide]:
    schema = {
        "type": "object",
        "properties": {
            "a": {"type": "string", "maxLength": 3},
            "b": {"type": "array", "items": {"type": "integer", "minimum": -9, "maximum": 99}, "maxItems": 3},
        },
        "required": ["a", "b"],
    }
    return [
        json_schema_guide(schema, common()),
        regex_guide("(ab|ba|c|é){3,}", common()),
        grammar_guide('start: "a" start "b" | "c"', common()),
        regex_guide("a?", common()),
    ]


def calling_host(mode: str, *, in_steps: bool) -> Speculator:
    """Two rows, drafts of 7 tokens."""
    spec = wrap(model(), tiers=(0, 7), policy="fixed:7", max_batch=2, max_len=63, backend="eager", **MODES[mode])
    target = spec.engine.submitter._factory._target
    assert target.calls_host
    target.calls_host = in_steps
    return spec


@pytest.fixture(scope="module", params=MODES)
def pair(request: pytest.FixtureRequest) -> Iterator[tuple[Speculator, Speculator]]:
    """A speculator that follows guides inside its steps, and one that does before them."""
    with calling_host(request.param, in_steps=True) as inside, calling_host(request.param, in_steps=False) as before:
        yield inside, before


def run(spec: Speculator, asked: list[Request]) -> list[list[int]]:
    submitted = [spec.engine.submit(**request) for request in asked]
    return [request.result().token_ids for request in submitted]


def requests() -> list[Request]:
    """Greedy and drawn ones of each guide, and some without a guide between them."""
    rng, made = random.Random(5), list[Request]()
    for guide in [*guides(), None]:
        for drawn in ({}, {"do_sample": True, "seed": rng.randrange(99), "temperature": 1.5, "top_k": 0}):
            prompt = [rng.randrange(1, 12) for _ in range(rng.randrange(1, 30))]
            request: Request = {"ids": prompt, "max_new_tokens": NEW, "eos_token_id": [EOS, VOCAB - 1], **drawn}
            made.append(request if guide is None else request | {"guide": guide})
    rng.shuffle(made)
    return made


@pytest.mark.parametrize("late", [False, True])
def test_texts_are_those_of_guides_inside_steps(
    pair: tuple[Speculator, Speculator], late: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    inside, before = pair
    expected = run(inside, requests())
    monkeypatch.setattr(before.engine.scheduler, "late", late)
    assert run(before, requests()) == expected
    assert run(before, requests()[::-1]) == expected[::-1], "in other slots"
    for request, text in zip(requests(), expected, strict=True):
        if "guide" in request:
            ended = text[-1] in request["eos_token_id"]
            assert request["guide"].matches(text[:-1] if ended else text, whole=ended)


def test_rows_have_the_drafts_of_guides_inside_steps(pair: tuple[Speculator, Speculator]) -> None:
    _, before = pair
    waiting = before.engine.traits.drafts_known
    assert waiting == (before.mode.name not in ("none", "early_exit"))
    for number, guide in enumerate(guides()):
        prompt = [5, 6, 7] * 5 + [number]
        asked: Request = {"max_new_tokens": 20, "eos_token_id": [EOS]}
        guided = [spec.engine.submit(prompt, guide=guide, **asked) for spec in pair]
        free = before.engine.submit(prompt, max_new_tokens=20, eos_token_id=[])
        for request in (*guided, free):
            request.result()
        expected, found = (request.stats for request in guided)
        assert free.stats.draft_tokens > 0 or before.mode.name == "none"
        if waiting:
            assert found.accepted_tokens == expected.accepted_tokens
            assert (found.draft_tokens, found.drafts_by) == (expected.draft_tokens, expected.drafts_by)
        else:
            assert found.draft_tokens == 0
    assert (before.arena["guide_number"] == 0).all(), "no step follows a guide"


@pytest.mark.parametrize("drawn", [{}, {"do_sample": True, "seed": 3}], ids=["greedy", "drawn"])
def test_a_complete_text_ends_before_the_least_number_of_tokens(
    pair: tuple[Speculator, Speculator], drawn: dict[str, Any]
) -> None:
    asked: Request = {"ids": [5, 6, 5, 6], "eos_token_id": [EOS], "min_new_tokens": 10, "logit_bias": {EOS: 50.0}}
    asked |= {"guide": regex_guide("(ab){1,3}", common()), **drawn}
    (text,), (expected,) = (run(spec, [asked]) for spec in pair[::-1])
    assert text == expected and common().decode(text[:-1]) == "ababab" and text[-1] == EOS


def test_a_guide_and_allowed_tokens_both_hold(pair: tuple[Speculator, Speculator]) -> None:
    a, b, c = common().convert_tokens_to_ids(["a", "b", "c"])
    asked: Request = {
        "ids": [3, 4],
        "eos_token_id": [EOS],
        "max_new_tokens": 12,
        "guide": regex_guide("[abc]+", common()),
    }
    asked["prefix_allowed_tokens_fn"] = lambda row, ids: [a, c, 9] if len(ids) % 2 else [b, 9]
    texts = [run(spec, [asked])[0] for spec in pair]
    assert texts[0] == texts[1] and len(texts[0]) == 12
    assert set(texts[0][::2]) == {b} and set(texts[0][1::2]) <= {a, c}


def test_a_guide_without_a_possible_token_ends_its_request_alone(pair: tuple[Speculator, Speculator]) -> None:
    for spec in pair:
        free: Request = {"ids": [5, 6, 5, 6], "max_new_tokens": 20, "eos_token_id": []}
        expected = run(spec, [free])[0]
        other = spec.engine.submit(**free)
        guide = regex_guide("ab", common())
        stuck = spec.engine.submit([5, 6, 5], eos_token_id=[EOS], suppress_tokens=[EOS], guide=guide)
        with raises(RequestFailed, reason=re.compile("forbid every token")) as caught:
            stuck.result()
        assert isinstance(caught.value.__cause__, UndecidedLogits) and guide.matches(stuck.new_tokens)
        assert other.result().token_ids == expected


def test_a_guide_that_fails_ends_its_request_alone(pair: tuple[Speculator, Speculator]) -> None:
    # No text of it ends.
    node = {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]}
    guide = json_schema_guide(node, common())
    for spec in pair:
        free: Request = {"ids": [5, 6, 5, 6], "max_new_tokens": 20, "eos_token_id": []}
        expected = run(spec, [free])[0]
        other = spec.engine.submit(**free)
        failing = spec.engine.submit([5, 6, 5], eos_token_id=[EOS], guide=guide)
        with raises(RequestFailed) as caught:
            failing.result()
        assert isinstance(caught.value.__cause__, InvalidGuide)
        assert other.result().token_ids == expected and run(spec, [free])[0] == expected


def test_a_slot_forgets_the_mask_of_its_guide(pair: tuple[Speculator, Speculator]) -> None:
    _, before = pair
    free: Request = {"ids": [5, 6, 7], "max_new_tokens": 20, "do_sample": True, "seed": 3, "eos_token_id": []}
    expected = run(before, [free] * 3)
    run(before, [{"ids": [5, 6], "max_new_tokens": 5, "eos_token_id": [EOS], "guide": guides()[1]}] * 3)
    assert run(before, [free] * 3) == expected


def test_several_sequences_of_one_prompt_each_follow_the_guide(pair: tuple[Speculator, Speculator]) -> None:
    options: dict[str, Any] = {
        "max_new_tokens": 20,
        "eos_token_id": [EOS],
        "num_return_sequences": 3,
        "do_sample": True,
    }
    outputs = [spec.generate(torch.tensor([[4, 5, 6]]), seed=2, guide=guides()[0], **options) for spec in pair]
    assert torch.equal(*outputs)

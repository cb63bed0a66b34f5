"""Sequences whose drafts are right, or wrong at every fifth place: where they end, and what processors change."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

import speccompile
from speccompile import Speculator
from support.letters import tokenizer
from support.tiny import greedy

PROMPT = [5, 17, 33, 8, 60, 5, 17, 33]
TIERS, MAX_LEN, NEW, EOS = (0, 3, 7), 64, 24, 7
#: Options of requests by name; the EOS id would come at once without ``min_new_tokens``.
OPTIONS: dict[str, dict[str, Any]] = {
    "none": {},
    "repetition": {"repetition_penalty": 1.3},
    "presence": {"presence_penalty": 0.7},
    "frequency": {"frequency_penalty": 0.3},
    "penalties": {"repetition_penalty": 1.2, "presence_penalty": 0.5, "frequency_penalty": 0.5},
    "min_new_tokens": {"min_new_tokens": 13, "logit_bias": {EOS: 50.0}},
    "bad_words": {"bad_words_ids": [[33], [60, 8]], "logit_bias": {8: 2.0}},
    "ngram": {"no_repeat_ngram_size": 2},
}


class Knows:
    """Drafts what comes next in the sequences that it knows, with another token at every ``wrong``-th place."""

    def __init__(self) -> None:
        self.sequences: list[list[int]] = []
        self.wrong = 0

    def __call__(self, tokens: Sequence[int], draft_len: int) -> list[int] | None:
        for known in self.sequences:
            if known[: len(tokens)] == list(tokens):
                places = range(len(tokens), min(len(tokens) + draft_len, len(known)))
                return [(known[i] + (self.wrong > 0 and i % self.wrong == 0)) % 128 for i in places]
        return None


TINY = {}


@pytest.fixture(scope="module")
def knows() -> Knows:
    return Knows()


@pytest.fixture(scope="module")
def spec(model: LlamaForCausalLM, knows: Knows) -> Iterator[Speculator]:
    sizes: dict[str, Any] = {"tiers": TIERS, "policy": "fixed:7", "max_len": MAX_LEN, "max_batch": 2}
    with speccompile.wrap(model, "user_provided", draft=knows, host=True, backend="eager", **sizes) as spec:
        yield spec


@pytest.fixture(scope="module")
def letters() -> PreTrainedTokenizerFast:
    return tokenizer()


@pytest.mark.parametrize("draft_len", TIERS)
def test_a_sequence_ends_at_any_place_among_accepted_drafts(
    spec: Speculator, model: LlamaForCausalLM, knows: Knows, letters: PreTrainedTokenizerFast, draft_len: int
) -> None:
    whole = greedy(model, PROMPT, MAX_LEN - len(PROMPT))
    knows.sequences, knows.wrong = [PROMPT + whole], 0
    spec.set_tier(draft_len)

    def ends(expected: list[int], reason: str, **options: Any) -> None:
        result = spec.engine.submit(PROMPT, tokenizer=letters, **options).result()
        assert (result.token_ids, result.finish_reason) == (expected, reason), options

    ends(whole, "max_len", max_new_tokens=1000)
    before = letters.decode(PROMPT)
    for count in range(1, 11):
        ends(whole[:count], "max_new_tokens", max_new_tokens=count)
        first = whole.index(whole[count - 1]) + 1
        ends(whole[:first], "eos", max_new_tokens=NEW, eos_token_id=whole[count - 1])
        # A stop string of two tokens, and one that is complete with the last token that may come.
        stop = letters.decode(whole[count - 1 : count + 1])
        if stop not in before + letters.decode(whole[:count]):
            ends(whole[: count + 1], "stop", max_new_tokens=NEW, stop=stop)
            ends(whole[: count + 1], "stop", max_new_tokens=count + 1, stop=stop)
    if draft_len:
        assert spec.engine.submit(PROMPT, max_new_tokens=NEW).result().acceptance_length > draft_len


def with_options(model: LlamaForCausalLM, options: dict[str, Any]) -> list[int]:
    """The greedy text over the model's own logits, each option by its definition."""
    sequence, new = list(PROMPT), list[int]()
    get = options.get
    while len(new) < NEW and EOS not in new:
        with torch.no_grad():
            scores = model(torch.tensor([sequence])).logits[0, -1].float()
        for token, bias in get("logit_bias", {}).items():
            scores[token] += bias
        for token in set(sequence):
            penalty = get("repetition_penalty", 1.0)
            scores[token] = scores[token] / penalty if scores[token] > 0 else scores[token] * penalty
        for token in set(new):
            scores[token] -= get("presence_penalty", 0.0) + get("frequency_penalty", 0.0) * new.count(token)
        size = get("no_repeat_ngram_size", len(sequence) + 1)
        for start in range(len(sequence) - size + 1):
            if sequence[start : start + size - 1] == sequence[len(sequence) - size + 1 :]:
                scores[sequence[start + size - 1]] = -torch.inf
        for word in get("bad_words_ids", []):
            if sequence[len(sequence) - len(word) + 1 :] == word[:-1]:
                scores[word[-1]] = -torch.inf
        if len(new) < get("min_new_tokens", 0):
            scores[EOS] = -torch.inf
        new.append(int(scores.argmax()))
        sequence.append(new[-1])
    return new


def test_processors_see_the_accepted_drafts_before_each_place(
    spec: Speculator, model: LlamaForCausalLM, knows: Knows
) -> None:
    expected = {name: with_options(model, options) for name, options in OPTIONS.items()}
    assert len({tuple(text) for text in expected.values()}) == len(OPTIONS), "each option changes the text"
    # Some of these sequences begin alike, so that the drafter is wrong where they part, too.
    knows.sequences = [PROMPT + text for text in expected.values()]
    for draft_len, wrong in ((0, 0), (3, 5), (7, 0), (7, 5)):
        spec.set_tier(draft_len)
        knows.wrong = wrong
        requests = [
            spec.engine.submit(PROMPT, max_new_tokens=NEW, eos_token_id=EOS, **options) for options in OPTIONS.values()
        ]
        for name, request in zip(OPTIONS, requests, strict=True):
            assert request.result().token_ids == expected[name], (name, draft_len, wrong)
        if draft_len:
            assert all(request.stats.accepted_tokens for request in requests)

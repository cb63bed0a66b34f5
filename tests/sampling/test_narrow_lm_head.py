"""Models whose lm_head has fewer tokens than their embedding: what a request brings is checked when it is submitted,
and no request ends those beside it by its ids."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM, LogitsProcessor

import speccompile
from speccompile import Speculator
from speccompile.errors import InvalidOption, RequestFailed
from speccompile.guides import regex_guide
from support.errors import raises
from support.serving import tokenizer
from support.tiny import tiny_llama

LOGITS, VOCAB, NEW = 300, 320, 10
#: With ids that the lm_head cannot choose.
PROMPT = [310, 5, 319, 7, 310]


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    made = tiny_llama(9, vocab=VOCAB)
    head = torch.nn.Linear(made.config.hidden_size, LOGITS, bias=False)
    with torch.no_grad():
        head.weight.copy_(made.lm_head.weight[:LOGITS])
    made.lm_head = head
    return made


@pytest.fixture(scope="module")
def spec(model: LlamaForCausalLM) -> Iterator[Speculator]:
    options: dict[str, Any] = {"max_batch": 2, "max_len": 64, "backend": "eager", "scores": True}
    with speccompile.wrap(model, "early_exit", tiers=(0, 2), policy="fixed:2", exit_layer=1, **options) as spec:
        yield spec


def of_transformers(model: LlamaForCausalLM, prompt: list[int], **options: Any) -> list[int]:
    ids = torch.tensor([prompt])
    given: dict[str, Any] = {"max_new_tokens": NEW, "do_sample": False, "pad_token_id": 0} | options
    out = model.generate(ids, attention_mask=torch.ones_like(ids), **given)
    return out[0, len(prompt) :].tolist()


class Narrow(LogitsProcessor):
    """Forbids even ids, by a mask as wide as transformers' scores."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores.masked_fill(torch.arange(LOGITS) % 2 == 0, float("-inf"))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"repetition_penalty": 1.3},
        {"no_repeat_ngram_size": 2},
        {"suppress_tokens": [310, 18]},
        {"begin_suppress_tokens": [310, 18]},
        {"min_new_tokens": 5, "eos_token_id": 310},
        {"logits_processor": [Narrow()]},
    ],
)
def test_texts_are_those_of_transformers_and_so_are_the_neighbours(
    spec: Speculator, model: LlamaForCausalLM, options: dict[str, Any]
) -> None:
    beside = spec.engine.submit([5, 6, 7], max_new_tokens=NEW, logprobs=True)
    spec.engine.step()
    request = spec.engine.submit(PROMPT, max_new_tokens=NEW, **options)
    assert request.result().token_ids == of_transformers(model, PROMPT, **options)
    assert beside.result().token_ids == of_transformers(model, [5, 6, 7])


@pytest.mark.parametrize(
    "options",
    [
        {"logit_bias": {310: 1.0}},
        {"bad_words_ids": [[5, 310]]},
        {"forced_eos_token_id": 310},
        {"forced_eos_token_id": [5, 310]},
    ],
)
def test_ids_that_would_have_to_be_chosen_are_refused(spec: Speculator, options: dict[str, Any]) -> None:
    with raises(InvalidOption, name=next(iter(options))):
        spec.engine.submit(PROMPT, max_new_tokens=NEW, **options)


@pytest.mark.parametrize("options", [{}, {"presence_penalty": 1.0, "frequency_penalty": 0.5}, {"typical_p": 0.9}])
def test_drawn_tokens_are_those_without_drafts(spec: Speculator, options: dict[str, Any]) -> None:
    drawn: dict[str, Any] = {"do_sample": True, "seed": 3, "temperature": 1.5, "max_new_tokens": NEW, **options}
    plain = spec.engine.submit(PROMPT, num_draft_tokens=0, **drawn).result()
    assert spec.engine.submit(PROMPT, **drawn).result().token_ids == plain.token_ids
    assert max(plain.token_ids) < LOGITS


def test_a_function_that_allows_such_an_id_ends_its_own_request(spec: Speculator, model: LlamaForCausalLM) -> None:
    beside = spec.engine.submit([5, 6, 7], max_new_tokens=NEW)
    failing = spec.engine.submit(PROMPT, max_new_tokens=NEW, prefix_allowed_tokens_fn=lambda *_: [310])
    with pytest.raises(RequestFailed, match="310 is not a token id"):
        failing.result()
    assert beside.result().token_ids == of_transformers(model, [5, 6, 7])


def test_a_guide_over_the_whole_vocabulary_is_followed(spec: Speculator) -> None:
    guide = regex_guide("(ab|the)+", tokenizer())
    request = spec.engine.submit(PROMPT, max_new_tokens=NEW, guide=guide, eos_token_id=0)
    assert set(tokenizer().decode(request.result().token_ids, skip_special_tokens=True)) <= set("abthe")


@pytest.mark.parametrize("name", ["output_logits", "output_scores"])
def test_returned_logits_are_as_wide_as_the_lm_head(spec: Speculator, name: str) -> None:
    result = spec.engine.submit(PROMPT, max_new_tokens=3, logprobs=True, prompt_logprobs=True, **{name: True}).result()
    kept = result.logits if name == "output_logits" else result.scores
    assert kept is not None and kept.shape == (3, LOGITS) and bool(kept.isfinite().all())
    assert result.prompt_logprobs is not None and result.prompt_logprobs[2] == float("-inf")

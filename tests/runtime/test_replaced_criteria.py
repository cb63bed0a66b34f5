"""A stopping criterion of the type of a built-in one replaces it, as in transformers: ``generate`` beside its own."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from transformers import (
    EosTokenCriteria,
    LlamaForCausalLM,
    MaxLengthCriteria,
    MaxTimeCriteria,
    StoppingCriteriaList,
    StopStringCriteria,
)

import speccompile
from speccompile import Speculator
from speccompile.errors import InvalidOption
from support.errors import raises
from support.letters import tokenizer

VOCAB = 128
PAD = 7
TINY = {}


@pytest.fixture(scope="module")
def spec(model: LlamaForCausalLM) -> Iterator[Speculator]:
    with speccompile.wrap(model, "ngram", tiers=(0, 3), max_batch=2, max_len=64, backend="eager") as spec:
        yield spec


def prompts(rows: int = 2, length: int = 5) -> torch.Tensor:
    return torch.randint(8, VOCAB, (rows, length), generator=torch.Generator().manual_seed(0))


def both(model: LlamaForCausalLM, spec: Speculator, ids: torch.Tensor, **arguments: Any) -> torch.Tensor:
    got = spec.generate(ids, torch.ones_like(ids), **arguments)
    expected = model.generate(ids, attention_mask=torch.ones_like(ids), **arguments)
    assert torch.equal(got, expected), f"{got.tolist()} instead of {expected.tolist()}"
    return got


@pytest.mark.parametrize("longest", [[20], [3], [12, 9], [9, 12]])
def test_a_max_length_criterion_replaces_max_new_tokens(
    model: LlamaForCausalLM, spec: Speculator, longest: list[int]
) -> None:
    criteria = StoppingCriteriaList([MaxLengthCriteria(length) for length in longest])
    both(model, spec, prompts(), max_new_tokens=4, stopping_criteria=criteria)
    both(model, spec, prompts(), max_length=7, stopping_criteria=criteria)


def test_an_eos_criterion_replaces_eos_token_id(model: LlamaForCausalLM, spec: Speculator) -> None:
    text = spec.generate(prompts(1), max_new_tokens=12)[0].tolist()
    arguments: dict[str, Any] = {"max_new_tokens": 12, "pad_token_id": PAD}
    early, late = text[6], next(token for token in text[8:] if token not in text[5:8])
    for given, least in ((late, {}), ([late, early], {}), (early, {"min_new_tokens": 3})):
        criteria = StoppingCriteriaList([EosTokenCriteria(given)])
        both(model, spec, prompts(), stopping_criteria=criteria, **arguments, **least)
        if not least:
            both(model, spec, prompts(), stopping_criteria=criteria, eos_token_id=early, **arguments)
    two = StoppingCriteriaList([EosTokenCriteria(late), EosTokenCriteria(early)])
    both(model, spec, prompts(), stopping_criteria=two, eos_token_id=text[5], **arguments)
    assert both(model, spec, prompts(1), stopping_criteria=two[:1], eos_token_id=early, **arguments).shape[1] > 7


def test_a_stop_string_criterion_replaces_stop_strings(model: LlamaForCausalLM, spec: Speculator) -> None:
    letters = tokenizer()
    text = spec.generate(prompts(1), max_new_tokens=12)[0].tolist()
    early, late = (letters.decode(text[place]) for place in (6, 9))
    criteria = StoppingCriteriaList([StopStringCriteria(letters, late)])
    arguments: dict[str, Any] = {"max_new_tokens": 12, "tokenizer": letters, "stopping_criteria": criteria}
    assert both(model, spec, prompts(1), stop_strings=early, **arguments).shape[1] > 7
    both(model, spec, prompts(1), stop_strings=early, **(arguments | {"stopping_criteria": StoppingCriteriaList()}))


def test_a_time_criterion_ends_every_row(model: LlamaForCausalLM, spec: Speculator) -> None:
    assert both(
        model, spec, prompts(), max_new_tokens=9, stopping_criteria=StoppingCriteriaList([MaxTimeCriteria(0, 0)])
    ).shape == (2, 6)
    assert both(model, spec, prompts(), max_new_tokens=9, stopping_criteria=[MaxTimeCriteria(999)]).shape == (2, 14)


@pytest.mark.parametrize(
    ("criterion", "option", "name"),
    [
        (MaxLengthCriteria(20), {"forced_eos_token_id": 9}, "forced_eos_token_id"),
        (EosTokenCriteria(9), {"min_new_tokens": 3, "eos_token_id": 8}, "min_new_tokens"),
        (EosTokenCriteria(9), {"min_length": 9, "eos_token_id": 8}, "min_new_tokens"),
    ],
)
def test_a_criterion_that_moves_an_end_is_refused_beside_what_depends_on_it(
    spec: Speculator, criterion: Any, option: dict[str, int], name: str
) -> None:
    reason = re.compile(f"^stopping_criteria has a {type(criterion).__name__}, which moves the end")
    with raises(InvalidOption, name=name, reason=reason):
        spec.generate(prompts(), max_new_tokens=4, stopping_criteria=[criterion], **option)

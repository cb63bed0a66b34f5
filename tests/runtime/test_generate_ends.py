"""Rows of ``generate`` end where transformers ends them: lengths, times, and criteria that replace them."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from transformers import (
    EosTokenCriteria,
    GenerationConfig,
    LlamaForCausalLM,
    MaxLengthCriteria,
    MaxTimeCriteria,
    StoppingCriteriaList,
    StopStringCriteria,
)

from speccompile import Speculator
from speccompile.errors import InvalidOption
from support.errors import raises
from support.generate_calls import PAD, both, prompts
from support.letters import tokenizer

# --- lengths and time --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("config", [{}, {"max_length": 12}, {"max_new_tokens": 3}])
def test_without_a_length_a_text_is_as_long_as_in_transformers(
    model: LlamaForCausalLM, spec: Speculator, config: dict[str, int]
) -> None:
    model.generation_config = GenerationConfig(**config)
    both(model, spec, prompts())


def test_max_time_ends_every_row_with_its_next_token(model: LlamaForCausalLM, spec: Speculator) -> None:
    ids = prompts(3)
    assert both(model, spec, ids, max_time=0.0, max_new_tokens=30).shape == (3, 6)
    assert both(model, spec, ids, generation_config=GenerationConfig(max_time=0, max_new_tokens=30)).shape == (3, 6)
    assert both(model, spec, ids, max_time=600, max_new_tokens=9).shape == (3, 14)
    # A criterion of that type replaces it, as in transformers.
    criterion = [MaxTimeCriteria(max_time=600)]
    assert both(model, spec, ids, max_time=0, stopping_criteria=criterion, max_new_tokens=9).shape == (3, 14)


def test_max_length_includes_the_prompt_with_its_padding(model: LlamaForCausalLM, spec: Speculator) -> None:
    assert both(model, spec, prompts(), max_length=9).shape == (2, 9)
    padded, mask = prompts(), torch.ones(2, 5, dtype=torch.int64)
    mask[0, :3] = 0
    assert spec.generate(padded, mask, max_length=9).shape == (2, 9)
    # As in transformers, max_new_tokens takes precedence.
    assert spec.generate(prompts(), max_length=9, max_new_tokens=2).shape == (2, 7)


@pytest.mark.parametrize("least", [{"min_length": 14}, {"min_new_tokens": 6}, {"min_length": 30, "min_new_tokens": 2}])
def test_no_row_ends_earlier_than_its_least_length(
    model: LlamaForCausalLM, spec: Speculator, least: dict[str, int]
) -> None:
    """``min_length`` includes the prompt with its padding, and ``min_new_tokens`` takes precedence."""
    ids, mask = prompts(), torch.ones(2, 5, dtype=torch.int64)
    mask[0, :3] = 0
    text = spec.generate(ids, mask, max_new_tokens=20)
    arguments: dict[str, Any] = {"max_new_tokens": 20, "pad_token_id": PAD}
    arguments["eos_token_id"] = sorted({int(text[0, 6]), int(text[1, 8])})
    got = spec.generate(ids, mask, **arguments, **least)
    assert torch.equal(got, model.generate(ids, attention_mask=mask, **arguments, **least))
    assert not torch.equal(got, spec.generate(ids, mask, **arguments))
    model.generation_config = GenerationConfig(**least)
    assert torch.equal(spec.generate(ids, mask, **arguments), got)


def test_a_request_counts_its_own_prompt_to_min_length(spec: Speculator) -> None:
    text = spec.engine.submit([9, 10, 11], max_new_tokens=12).result().token_ids
    short = spec.engine.submit([9, 10, 11], max_new_tokens=12, eos_token_id=text[1])
    longer = spec.engine.submit([9, 10, 11], max_new_tokens=12, eos_token_id=text[1], min_length=9)
    assert len(short.result().token_ids) <= 2
    assert len(longer.result().token_ids) >= 7


# --- a criterion of the type of a built-in one replaces it, as in transformers -----------------------------------


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

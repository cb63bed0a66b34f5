"""``generate`` follows ``generation_config=`` and the model's own config as transformers does."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from transformers import (
    GenerationConfig,
    LlamaForCausalLM,
)

from speccompile import Speculator
from speccompile.errors import IgnoredSetting, InvalidInput, InvalidOption
from speccompile.sampling.request import _warn_unread
from support.errors import raises
from support.generate_calls import PAD, both, prompts


def test_a_config_of_transformers_own_defaults_passes(model: LlamaForCausalLM, spec: Speculator) -> None:
    defaults = {name: value for name, value in GenerationConfig._get_default_generation_params().items()}
    length = {"max_length": 12}
    both(model, spec, prompts(), generation_config=GenerationConfig(**(defaults | length)))
    both(model, spec, prompts(), **(defaults | length))


def test_a_cache_that_a_generation_config_names_passes_unless_it_rounds(spec: Speculator) -> None:
    expected = spec.generate(prompts())
    assert torch.equal(
        spec.generate(prompts(), generation_config=GenerationConfig(cache_implementation="hybrid")), expected
    )
    with raises(InvalidOption, where="generation_config", name="cache_implementation"):
        spec.generate(prompts(), generation_config=GenerationConfig(cache_implementation="quantized"))


def test_a_generation_config_is_followed(model: LlamaForCausalLM, spec: Speculator) -> None:
    config = GenerationConfig(max_new_tokens=9, repetition_penalty=1.4, pad_token_id=PAD, num_return_sequences=1)
    assert both(model, spec, prompts(), generation_config=config).shape == (2, 14)


def test_keywords_take_precedence_over_the_config(model: LlamaForCausalLM, spec: Speculator) -> None:
    config = GenerationConfig(max_new_tokens=9, repetition_penalty=1.4, num_beams=3)
    got = both(model, spec, prompts(), generation_config=config, max_new_tokens=4, repetition_penalty=1.0, num_beams=1)
    assert torch.equal(got, spec.generate(prompts(), max_new_tokens=4))


def test_fields_that_the_config_leaves_out_are_the_models(model: LlamaForCausalLM, spec: Speculator) -> None:
    plain = spec.generate(prompts(1), max_new_tokens=9)
    model.generation_config.eos_token_id = int(plain[0, 8])
    model.generation_config.repetition_penalty = 1.0
    got = both(model, spec, prompts(1), generation_config=GenerationConfig(max_new_tokens=9, pad_token_id=PAD))
    assert got.shape[1] <= 9


def test_none_switches_off_what_the_model_has(model: LlamaForCausalLM, spec: Speculator) -> None:
    model.generation_config.repetition_penalty = 1.9
    got = both(model, spec, prompts(), max_new_tokens=12, repetition_penalty=None)
    model.generation_config = GenerationConfig()
    assert torch.equal(got, spec.generate(prompts(), max_new_tokens=12))


@pytest.mark.parametrize(("name", "value"), [("presence_penalty", 1.5), ("frequency_penalty", 1.5)])
def test_an_option_that_transformers_does_not_read_in_a_config_is_left_out_with_one_warning(
    name: str, value: float, model: LlamaForCausalLM, spec: Speculator
) -> None:
    _warn_unread.cache_clear()
    config = GenerationConfig(**{name: value})
    penalised = spec.generate(prompts(), max_new_tokens=24, **{name: value})
    with pytest.warns(IgnoredSetting, match=f"^generation_config has {name}={value}, which has no effect") as warned:
        for _ in range(2):
            got = both(model, spec, prompts(), generation_config=config, max_new_tokens=24)
    assert len(warned) == 1 and not torch.equal(got, penalised)
    model.generation_config = config
    with pytest.warns(IgnoredSetting, match=f"^the model's generation_config has {name}"):
        both(model, spec, prompts(), max_new_tokens=24)
    assert torch.equal(spec.generate(prompts(), max_new_tokens=24, **{name: value}), penalised)
    assert torch.equal(spec.generate(prompts(), max_new_tokens=24, **{name: None}), got)


@pytest.mark.parametrize(
    ("config", "arguments"),
    [
        ({"do_sample": True}, {"do_sample": None}),
        ({"max_new_tokens": 3, "max_length": 9}, {"max_new_tokens": None}),
        ({"max_new_tokens": 3}, {"max_length": None}),
        ({"stop_strings": ["a"]}, {"stop_strings": None}),
        ({"return_dict_in_generate": True}, {"return_dict_in_generate": None}),
        ({"return_dict_in_generate": True, "output_scores": True}, {"output_scores": None}),
        ({"return_dict_in_generate": True, "output_logits": True}, {"output_logits": None}),
    ],
)
def test_none_switches_off_what_the_config_has(
    model: LlamaForCausalLM, spec: Speculator, config: dict[str, Any], arguments: dict[str, Any]
) -> None:
    model.generation_config = GenerationConfig(**({"max_new_tokens": 9} | config))
    ids = prompts()
    got, expected = (
        call(ids, attention_mask=torch.ones_like(ids), **arguments) for call in (spec.generate, model.generate)
    )
    if isinstance(expected, torch.Tensor):
        assert torch.equal(got, expected)
    else:
        assert (got.scores, got.logits) == (expected.scores, expected.logits) == (None, None)
        assert torch.equal(got.sequences, expected.sequences)


@pytest.mark.parametrize("off", [{"eos_token_id": None}, {"pad_token_id": None}, {}])
def test_none_is_no_eos_id_and_no_pad_id(model: LlamaForCausalLM, spec: Speculator, off: dict[str, None]) -> None:
    ends = spec.generate(prompts(), max_new_tokens=12)[0, 8]
    model.generation_config = GenerationConfig(eos_token_id=int(ends), pad_token_id=PAD)
    both(model, spec, prompts(), max_new_tokens=12, **off)


def test_none_for_top_k_is_no_top_k(model: LlamaForCausalLM, spec: Speculator) -> None:
    """50 is transformers' default for what is not given."""
    model.generation_config.top_k = 1
    alone = spec.generate(prompts(), max_new_tokens=9, do_sample=True, seed=3)
    everything = spec.generate(prompts(), max_new_tokens=9, do_sample=True, seed=3, top_k=None)
    assert torch.equal(alone, spec.generate(prompts(), max_new_tokens=9))
    assert torch.equal(everything, spec.generate(prompts(), max_new_tokens=9, do_sample=True, seed=3, top_k=0))
    assert not torch.equal(everything, alone)


@pytest.mark.parametrize(("name", "value"), [("temperature", 1.0), ("top_k", 50), ("top_p", 1.0), ("min_p", 0.0)])
def test_options_of_draws_at_their_defaults_pass_without_draws(spec: Speculator, name: str, value: float) -> None:
    assert spec.generate(prompts(), max_new_tokens=3, do_sample=False, **{name: value}).shape == (2, 8)


def test_options_of_a_config_that_draws_mean_nothing_to_a_greedy_call(spec: Speculator) -> None:
    config = GenerationConfig(max_new_tokens=4, do_sample=True, temperature=0.5, top_p=0.4)
    greedy = spec.generate(prompts(), generation_config=config, do_sample=False)
    assert torch.equal(greedy, spec.generate(prompts(), max_new_tokens=4))
    drawn = spec.generate(prompts(), generation_config=config, seed=4)
    assert torch.equal(
        drawn, spec.generate(prompts(), max_new_tokens=4, do_sample=True, temperature=0.5, top_p=0.4, seed=4)
    )


def test_a_config_is_left_as_it_was(model: LlamaForCausalLM, spec: Speculator) -> None:
    config = GenerationConfig(max_new_tokens=4)
    before = config.to_dict(), model.generation_config.to_dict()
    spec.generate(prompts(), generation_config=config, max_new_tokens=2, top_k=None, num_beams=1)
    assert (config.to_dict(), model.generation_config.to_dict()) == before


@pytest.mark.parametrize(
    ("options", "name", "reason"),
    [
        ({"num_beams": 3}, "num_beams", r"; set generation_config\.num_beams = 1"),
        ({"top_p": 7.0, "do_sample": True}, "top_p", "at most 1"),
        ({"num_return_sequences": 0}, "num_return_sequences", "at least 1"),
    ],
)
def test_an_error_in_a_config_names_it(spec: Speculator, options: dict[str, Any], name: str, reason: str) -> None:
    source = {"where": "generation_config", "name": name, "value": options[name]}
    with raises(InvalidOption, **source, reason=re.compile(reason)):
        spec.generate(prompts(), generation_config=GenerationConfig(**options))


def test_a_max_length_of_a_config_counts_the_prompt(spec: Speculator) -> None:
    reason = re.compile("the prompt already has 5 tokens")
    with raises(InvalidOption, where="generate", name="max_length", value=3, reason=reason):
        spec.generate(prompts(), generation_config=GenerationConfig(max_length=3))


def test_what_is_no_config_is_refused(spec: Speculator) -> None:
    with raises(InvalidOption, name="generation_config", reason=re.compile("must be a transformers GenerationConfig")):
        spec.generate(prompts(), generation_config={"max_new_tokens": 4})  # type: ignore[arg-type]
    with raises(InvalidInput, name="attention_mask", reason=re.compile(r"give that as generation_config=\.\.\.")):
        spec.generate(prompts(), attention_mask=GenerationConfig())  # type: ignore[call-overload]


def test_a_config_may_be_the_second_argument_as_in_transformers(model: LlamaForCausalLM, spec: Speculator) -> None:
    ids, config = prompts(), GenerationConfig(max_new_tokens=4, do_sample=False)
    mask = torch.ones_like(ids)
    mask[0, :2] = 0
    got = spec.generate(ids, config, attention_mask=mask)
    assert torch.equal(got, model.generate(ids, config, attention_mask=mask))
    assert torch.equal(got, spec.generate(ids, mask, generation_config=config))
    assert not torch.equal(got, spec.generate(ids, config))
    with raises(InvalidInput, name="generation_config", reason=re.compile("it is given twice")):
        spec.generate(ids, config, generation_config=config)
    with raises(InvalidInput, name="attention_mask", reason=re.compile("it is given twice")):
        spec.generate(ids, mask, attention_mask=mask)


def test_several_sequences_of_a_config(model: LlamaForCausalLM, spec: Speculator) -> None:
    config = GenerationConfig(do_sample=True, num_return_sequences=2)
    got = spec.generate(prompts(1), max_new_tokens=3, generation_config=config, seed=1)
    assert got.shape == (2, 8)
    model.generation_config.num_return_sequences = 2
    assert torch.equal(spec.generate(prompts(1), max_new_tokens=3, do_sample=True, seed=1), got)
    with raises(InvalidOption, name="num_return_sequences", value=2, reason=re.compile("only generate reads it")):
        spec.engine.submit([9, 10])

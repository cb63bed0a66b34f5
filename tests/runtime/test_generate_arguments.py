"""``generate`` knows every parameter of transformers' ``generate``: it does the same, or says why not."""

from __future__ import annotations

import inspect
import re
from typing import Any

import pytest
import torch
from transformers import (
    GenerationConfig,
    LlamaForCausalLM,
    LogitsProcessorList,
)

import speccompile
from speccompile import Speculator
from speccompile.errors import InvalidInput, InvalidOption, UnknownOption
from speccompile.runtime.arguments import IGNORED, REFUSED, SUPPORTED
from speccompile.sampling import OPTIONS
from speccompile.utils.transformers_version import CACHE_NAMES
from support.errors import raises
from support.generate_calls import PAD, VOCAB, both, prompts

# --- the tables --------------------------------------------------------------------------------------------------


def test_every_parameter_of_transformers_is_in_one_table() -> None:
    parameters = set(inspect.signature(LlamaForCausalLM.generate).parameters) - {"self", "kwargs"}
    fields = {name for name in vars(GenerationConfig()) if not name.startswith("_")}
    tables = [set(SUPPORTED), set(OPTIONS), set(IGNORED), set(REFUSED)]
    for name in parameters | fields:
        assert sum(name in table for table in tables) == 1, name


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_neutral_values_pass(spec: Speculator, name: str) -> None:
    expected = spec.generate(prompts(), max_new_tokens=3)
    for value in (None, *REFUSED[name].neutral):
        assert torch.equal(spec.generate(prompts(), max_new_tokens=3, **{name: value}), expected)


@pytest.mark.parametrize("name", sorted(IGNORED | OPTIONS.keys()))
def test_none_passes(spec: Speculator, name: str) -> None:
    expected = spec.generate(prompts(), max_new_tokens=3)
    assert torch.equal(spec.generate(prompts(), max_new_tokens=3, **{name: None}), expected)


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("num_beams", 2, "beam search is not supported"),
        ("assistant_model", object(), r"wrap\(model, mode='draft_target', draft=assistant_model\)"),
        ("prompt_lookup_num_tokens", 3, r"wrap\(model, mode='ngram'\)"),
        ("use_mtp", True, r"wrap\(model, mode='mtp'\)"),
        ("assistant_early_exit", 1, r"wrap\(model, mode='early_exit', exit_layer=\.\.\.\)"),
        ("use_cache", False, "the KV cache is part of the steps"),
        ("synced_gpus", True, "one process decodes"),
        ("cache_implementation", "quantized", "in the model's own dtype"),
        ("guidance_scale", 1.5, "runs the model twice"),
        ("negative_prompt_ids", torch.ones(1, 2), "runs the model twice"),
        ("custom_generate", print, "the engine's own loop decodes"),
        ("cache_implementation", "dynamic", "allocated once"),
        ("max_time", -1, "a number of seconds, at least 0"),
        ("top_h", 0.5, "it changes the text and is not supported yet"),
        ("position_ids", torch.ones(1, 5), "no model inputs except"),
        ("inputs_embeds", torch.ones(1, 5, 64), "no model inputs except"),
        *((name, (), "no model inputs except") for name in CACHE_NAMES),
    ],
)
def test_other_values_are_refused_with_the_reason(spec: Speculator, name: str, value: Any, reason: str) -> None:
    with raises(InvalidOption, where="generate", name=name, reason=re.compile(reason)):
        spec.generate(prompts(), max_new_tokens=3, **{name: value})


def test_unknown_names_stay_errors(spec: Speculator) -> None:
    for value in (3, None):
        with raises(UnknownOption, where="generate", names="max_new_token", similar=" Did you mean max_new_tokens?"):
            spec.generate(prompts(), max_new_token=value)
    with raises(UnknownOption, where="generate", names="stop", similar=" Did you mean stop_strings?"):
        spec.generate(prompts(), stop="a")
    with raises(UnknownOption, where="submit", names="stop_strings", similar=" Did you mean stop?"):
        spec.engine.submit([5], stop_strings="a")
    with raises(UnknownOption, where="generate", names="pixel_values", similar=""):
        spec.generate(prompts(), pixel_values=torch.ones(1))


def test_inputs_of_other_models_pass_at_none(spec: Speculator) -> None:
    assert torch.equal(spec.generate(prompts(), pixel_values=None), spec.generate(prompts()))


# --- processors that transformers has as well --------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        {"sequence_bias": [[[20, 21], -3.0], [[30], 4.0], [[30, 31], 9.0], [[9, 31], -2.5]]},
        {"sequence_bias": [[[item], item % 7 - 3.0] for item in range(VOCAB)], "repetition_penalty": 1.3},
        {"renormalize_logits": True, "remove_invalid_values": True, "suppress_tokens": [30, 31]},
    ],
    ids=lambda options: ", ".join(options),
)
def test_greedy_text_with_processors_is_that_of_transformers(
    model: LlamaForCausalLM, spec: Speculator, options: dict[str, Any]
) -> None:
    both(model, spec, prompts(), max_new_tokens=40, **options)
    both(model, spec, prompts(), generation_config=GenerationConfig(max_new_tokens=40, **options))


@pytest.mark.parametrize("empty", [None, [], LogitsProcessorList()])
def test_no_logits_processors_pass(spec: Speculator, empty: Any) -> None:
    assert spec.generate(prompts(), max_new_tokens=3, logits_processor=empty).shape == (2, 8)


@pytest.mark.parametrize("empty", [[], (), {}])
def test_an_empty_sequence_bias_has_no_effect(spec: Speculator, empty: Any) -> None:
    plain = spec.generate(prompts(), max_new_tokens=3)
    assert torch.equal(spec.generate(prompts(), max_new_tokens=3, sequence_bias=empty), plain)


# --- prompts -----------------------------------------------------------------------------------------------------


def test_inputs_is_another_name_of_input_ids(spec: Speculator) -> None:
    expected = spec.generate(prompts(), max_new_tokens=3)
    assert torch.equal(spec.generate(inputs=prompts(), max_new_tokens=3), expected)
    with raises(InvalidInput, name="inputs", reason=re.compile("give one of them")):
        spec.generate(prompts(), inputs=prompts())


def test_without_a_prompt_it_begins_with_the_bos_token(model: LlamaForCausalLM, spec: Speculator) -> None:
    got = spec.generate(max_new_tokens=4, bos_token_id=5)
    assert torch.equal(got, model.generate(max_new_tokens=4, bos_token_id=5))
    with raises(InvalidInput, name="input_ids", reason=re.compile("it is missing; give token ids.*bos_token_id")):
        spec.generate(max_new_tokens=4)


# --- more prompts than slots -------------------------------------------------------------------------------------


def test_more_prompts_than_slots_are_queued(model: LlamaForCausalLM, spec: Speculator) -> None:
    """Eleven rows of different lengths through two slots, in order."""
    ids, mask = prompts(11, 9), torch.ones(11, 9, dtype=torch.int64)
    for row in range(11):
        mask[row, : row % 5] = 0
    plain = model.generate(ids, attention_mask=mask, max_new_tokens=10)
    ends = {"eos_token_id": [int(plain[3, 12]), int(plain[8, 15])], "pad_token_id": PAD}
    got = spec.generate(ids, mask, max_new_tokens=10, **ends)
    assert torch.equal(got, model.generate(ids, attention_mask=mask, max_new_tokens=10, **ends))
    assert len(spec.stats.requests) == 11
    assert spec.engine.idle


def test_continuations_are_queued_too(model: LlamaForCausalLM, spec: Speculator) -> None:
    got = spec.generate(prompts(3), max_new_tokens=4, num_return_sequences=3)
    expected = model.generate(prompts(3), max_new_tokens=4).repeat_interleave(3, dim=0)
    assert torch.equal(got, expected)
    drawn = spec.generate(prompts(3), max_new_tokens=4, num_return_sequences=3, do_sample=True, seed=1)
    alone = [spec.generate(prompts(3)[i // 3 :][:1], max_new_tokens=4, do_sample=True, seed=1 + i) for i in range(9)]
    assert torch.equal(drawn, torch.cat(alone))


def test_a_queue_without_room_holds_no_call_up(model: LlamaForCausalLM) -> None:
    """Rows wait in their call where the queue is full."""
    with speccompile.wrap(model, tiers=(0,), max_batch=2, max_len=32, max_waiting=0, backend="eager") as small:
        expected = model.generate(prompts(7), max_new_tokens=5)
        assert torch.equal(small.generate(prompts(7), max_new_tokens=5), expected)


def test_rows_that_fail_end_the_call_and_leave_nothing(spec: Speculator) -> None:
    def fail(ids: torch.Tensor, scores: Any) -> bool:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        spec.generate(prompts(9), max_new_tokens=5, stopping_criteria=[fail])
    assert spec.engine.idle
    assert spec.engine.capacity().free_slots == 2

"""``generate`` knows every parameter of transformers' ``generate``: it does the same, or says why not."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from transformers import (
    EosTokenCriteria,
    GenerationConfig,
    LlamaForCausalLM,
    LogitsProcessorList,
    MaxLengthCriteria,
    MaxTimeCriteria,
    StoppingCriteriaList,
    StopStringCriteria,
)

import speccompile
from speccompile import Speculator
from speccompile.errors import IgnoredSetting, InvalidInput, InvalidOption, UnknownOption
from speccompile.runtime.arguments import IGNORED, REFUSED, SUPPORTED
from speccompile.sampling import OPTIONS
from speccompile.sampling.request import _warn_unread
from speccompile.utils.transformers_version import CACHE_NAMES
from support.errors import raises
from support.letters import tokenizer

VOCAB = 128
PAD = 7


@pytest.fixture(scope="module")
def shared(model: LlamaForCausalLM) -> Speculator:
    return speccompile.wrap(model, "ngram", tiers=(0, 3), max_batch=2, max_len=64, backend="eager")


@pytest.fixture
def spec(shared: Speculator, model: LlamaForCausalLM) -> Iterator[Speculator]:
    before = model.generation_config
    model.generation_config = GenerationConfig()
    yield shared
    model.generation_config = before


def prompts(rows: int = 2, length: int = 5) -> torch.Tensor:
    return torch.randint(8, VOCAB, (rows, length), generator=torch.Generator().manual_seed(0))


def both(model: LlamaForCausalLM, spec: Speculator, ids: torch.Tensor, **arguments: Any) -> torch.Tensor:
    got = spec.generate(ids, torch.ones_like(ids), **arguments)
    expected = model.generate(ids, attention_mask=torch.ones_like(ids), **arguments)
    assert torch.equal(got, expected), f"{got.tolist()} instead of {expected.tolist()}"
    return got


# --- the tables --------------------------------------------------------------------------------------------------


def test_every_parameter_of_transformers_is_in_one_table() -> None:
    parameters = set(inspect.signature(LlamaForCausalLM.generate).parameters) - {"self", "kwargs"}
    fields = {name for name in vars(GenerationConfig()) if not name.startswith("_")}
    tables = [set(SUPPORTED), set(OPTIONS), set(IGNORED), set(REFUSED)]
    for name in parameters | fields:
        assert sum(name in table for table in tables) == 1, name


def test_a_config_of_transformers_own_defaults_passes(model: LlamaForCausalLM, spec: Speculator) -> None:
    defaults = {name: value for name, value in GenerationConfig._get_default_generation_params().items()}
    length = {"max_length": 12}
    both(model, spec, prompts(), generation_config=GenerationConfig(**(defaults | length)))
    both(model, spec, prompts(), **(defaults | length))


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


def test_a_cache_that_a_generation_config_names_passes_unless_it_rounds(spec: Speculator) -> None:
    expected = spec.generate(prompts())
    assert torch.equal(
        spec.generate(prompts(), generation_config=GenerationConfig(cache_implementation="hybrid")), expected
    )
    with raises(InvalidOption, where="generation_config", name="cache_implementation"):
        spec.generate(prompts(), generation_config=GenerationConfig(cache_implementation="quantized"))


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


# --- processors that transformers has as well -------------------------------------------------------------------


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


# --- generation_config= ------------------------------------------------------------------------------------------


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


# --- prompts and lengths -----------------------------------------------------------------------------------------


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


def test_several_sequences_of_a_config(model: LlamaForCausalLM, spec: Speculator) -> None:
    config = GenerationConfig(do_sample=True, num_return_sequences=2)
    got = spec.generate(prompts(1), max_new_tokens=3, generation_config=config, seed=1)
    assert got.shape == (2, 8)
    model.generation_config.num_return_sequences = 2
    assert torch.equal(spec.generate(prompts(1), max_new_tokens=3, do_sample=True, seed=1), got)
    with raises(InvalidOption, name="num_return_sequences", value=2, reason=re.compile("only generate reads it")):
        spec.engine.submit([9, 10])


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


# --- a criterion of the type of a built-in one replaces it, as in transformers -------------------------------


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

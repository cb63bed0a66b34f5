"""The options of requests are written once: signatures, docstrings, dataclasses, command line and docs agree."""

from __future__ import annotations

import inspect
from dataclasses import fields
from typing import Any, get_type_hints

import numpy as np
import pytest

from speccompile import Speculator
from speccompile.cli import commands, training_commands
from speccompile.errors import InvalidOption
from speccompile.ops.noise import SEEDS
from speccompile.runtime.arguments import SUPPORTED
from speccompile.runtime.engine import Engine
from speccompile.runtime.request_options import GenerateOptions, SaveOptions, SubmitOptions
from speccompile.utils.not_given import NOT_GIVEN
from speccompile.utils.options import Options
from support.docstrings import different_paragraphs, paragraphs
from support.errors import raises

CALLS: list[tuple[Any, type[Options]]] = [
    (Engine.submit, SubmitOptions),
    (Speculator.generate, GenerateOptions),
    (Speculator.save_hidden_states, SaveOptions),
]
#: Parameters that are not options; the last one is every other keyword.
OTHERS = {"self", "ids", "texts", "input_ids", "mask_or_config", "attention_mask", "inputs", "options"}


def parameters(call: Any, options: type[Options]) -> dict[str, inspect.Parameter]:
    """Of the call those that are options."""
    own = inspect.signature(call).parameters
    return {name: item for name, item in own.items() if name not in OTHERS or name in options.names()}


@pytest.mark.parametrize(("call", "options"), CALLS)
def test_signatures_have_the_names_types_and_defaults_of_the_options(call: Any, options: type[Options]) -> None:
    own = parameters(call, options)
    assert list(own) == options.names()
    assert set(options.inputs) <= inspect.signature(call).parameters.keys()
    for item in fields(options):
        if item.name in own:
            assert (own[item.name].annotation, own[item.name].default) == (item.type, item.default)
            assert own[item.name].kind is inspect.Parameter.KEYWORD_ONLY


@pytest.mark.parametrize(("call", "options"), CALLS)
def test_each_paragraph_of_a_docstring_begins_with_the_sentence_of_its_option(call: Any, options: Any) -> None:
    assert paragraphs(call).keys() == inspect.signature(call).parameters.keys() - {"self"}
    assert not different_paragraphs(call, options)


def test_the_command_line_shows_the_sentences_of_the_options() -> None:
    shown = set()
    for command in (commands.generate, training_commands.save_hidden_states):
        for name, hint in get_type_hints(command, include_extras=True).items():
            if name in GenerateOptions.names():
                (info,) = hint.__metadata__
                assert info.help.startswith(GenerateOptions.sentence(name)) and info.min == GenerateOptions.least(name)
                shown.add(name)
    assert shown == {"max_new_tokens", "do_sample", "seed"}


def test_what_generate_reads_is_what_it_accepts() -> None:
    assert set(SUPPORTED) == {"input_ids", "attention_mask", "inputs", *GenerateOptions.names()}


def test_fields_of_a_generation_config_are_those_that_may_be_left_out() -> None:
    assert GenerateOptions().config_fields() == {}
    given = GenerateOptions(max_new_tokens=None, do_sample=True, seed=3, stop_strings=NOT_GIVEN)
    assert given.config_fields() == {"max_new_tokens": None, "do_sample": True}


# --- checks --------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [SubmitOptions, GenerateOptions, SaveOptions])
@pytest.mark.parametrize(
    ("name", "value"),
    [
        *[("max_new_tokens", value) for value in (0, -1, 1.0, True, "3")],
        *[("seed", value) for value in (-1, SEEDS, 1.0, True, "1")],
        *[("do_sample", value) for value in (1, "yes")],
    ],
)
def test_values_that_are_not_valid(options: Any, name: str, value: Any) -> None:
    with raises(InvalidOption, where=options.where, name=name, value=value):
        options(**{name: value})


@pytest.mark.parametrize("name", ["logprobs", "prompt_logprobs", "output_logits", "output_scores"])
def test_flags_of_a_request(name: str) -> None:
    with raises(InvalidOption, where="submit", name=name, value=None, reason="use True or False"):
        SubmitOptions(**{name: None})


@pytest.mark.parametrize("value", ["", 1, None])
def test_a_record_is_a_flag_or_an_id(value: Any) -> None:
    reason = "use True, False, or the id of its record"
    with raises(InvalidOption, where="submit", name="record", value=value, reason=reason):
        SubmitOptions(record=value)


def test_numpy_values_are_values() -> None:
    options = SubmitOptions(max_new_tokens=np.int64(3), seed=np.uint8(4), do_sample=np.True_)  # type: ignore[arg-type]
    assert (options.max_new_tokens, options.seed, options.do_sample) == (3, 4, True)
    assert type(options.do_sample) is bool and SubmitOptions(seed=SEEDS - 1).seed == SEEDS - 1

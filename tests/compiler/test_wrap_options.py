"""The options of ``wrap`` are written once: signature, docstring, dataclass, command line and docs agree."""

from __future__ import annotations

import inspect
import sys
from dataclasses import fields
from typing import Any, NoReturn, get_type_hints

import numpy as np
import pytest
from transformers import LlamaForCausalLM

import speccompile
from speccompile import Adapters
from speccompile.cli import commands, training_commands
from speccompile.cli.arguments import TIERS
from speccompile.compiler.options import DEFAULT_MODE, DEFAULT_TIERS, WrapOptions
from speccompile.compiler.package import read_wrap_options
from speccompile.errors import InvalidTiers, UnknownOption, UnknownTier
from speccompile.modes.ngram import NGram
from speccompile.ops.cpu.forms import FORMS
from speccompile.utils.not_given import NOT_GIVEN
from speccompile.utils.weight_forms import WEIGHT_FORMS
from support.docstrings import different_paragraphs, paragraphs
from support.errors import raises

#: Parameters of ``wrap`` that are not options.
OTHERS = {"model", "consume", "progress", "mode_options"}
#: The module; the package's attribute of that name is the function.
WRAP = sys.modules[speccompile.wrap.__module__]


def test_the_signature_of_wrap_has_the_names_types_and_defaults_of_the_options() -> None:
    parameters = inspect.signature(speccompile.wrap).parameters
    assert [name for name in parameters if name not in OTHERS] == WrapOptions.names()
    for item in fields(WrapOptions):
        if item.name in ("mode", "mode_options"):
            continue
        parameter = parameters[item.name]
        assert (parameter.annotation, parameter.default) == (item.type, item.default)
        assert parameter.kind is parameter.KEYWORD_ONLY
    assert parameters["mode"].default is NOT_GIVEN


def test_each_paragraph_of_the_docstring_begins_with_the_sentence_of_its_option() -> None:
    assert paragraphs(speccompile.wrap).keys() == inspect.signature(speccompile.wrap).parameters.keys()
    assert not different_paragraphs(speccompile.wrap, WrapOptions)


def test_every_argument_of_wrap_becomes_its_option(model: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch) -> None:
    given = {name: object() for name in WrapOptions.names()}
    seen: list[dict[str, Any]] = []

    def options(**arguments: Any) -> NoReturn:
        seen.append(arguments)
        raise LookupError("the arguments are known")

    monkeypatch.setattr(WRAP, "WrapOptions", options)
    with pytest.raises(LookupError, match="the arguments are known"):
        speccompile.wrap(model, **given, max_depth=7)
    assert seen == [given | {"mode_options": {"max_depth": 7}}]


def test_arguments_become_the_same_options_again() -> None:
    options = WrapOptions(mode="suffix", tiers=(0, 2), adapters=Adapters(2), mode_options={"max_depth": 7})
    assert options.arguments().keys() == {*WrapOptions.names(), "max_depth"}
    assert WrapOptions.of(options.arguments()) == options


def test_a_manifest_holds_the_arguments() -> None:
    options = WrapOptions(mode=("suffix", "ngram"), tiers=(0, 2), mode_options={"min_score": 0.5})
    manifest = {"options": {name: list(x) if isinstance(x, tuple) else x for name, x in options.arguments().items()}}
    assert read_wrap_options(manifest) == options


def test_a_manifest_may_have_the_older_name_of_an_option() -> None:
    assert read_wrap_options({"options": {"consume": False, "max_batch": 2}}) == WrapOptions(max_batch=2)
    assert WrapOptions.of({"consume": True}).free_originals is True


@pytest.mark.parametrize("name", ["free_originals", "consume"])
def test_originals_are_freed_under_either_name(
    name: str, model: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[dict[str, Any]] = []

    def options(**arguments: Any) -> NoReturn:
        seen.append(arguments)
        raise LookupError("the arguments are known")

    monkeypatch.setattr(WRAP, "WrapOptions", options)
    with pytest.raises(LookupError, match="the arguments are known"):
        speccompile.wrap(model, **{name: True})
    assert seen[0]["free_originals"] is True and "consume" not in seen[0]


def test_unknown_options_are_answered_with_the_names_of_all(model: LlamaForCausalLM) -> None:
    known = ", ".join(["progress", *WrapOptions.names(), *NGram.options()])
    with raises(UnknownOption, where="wrap(mode='ngram')", names="batch", known=known):
        speccompile.wrap(model, batch=2)


# --- the command line ----------------------------------------------------------------------------


COMMANDS = (commands.demo, commands.generate, commands.inspect, training_commands.save_hidden_states)


def test_the_command_line_shows_the_sentences_and_bounds_of_the_options() -> None:
    shown = set()
    for command in COMMANDS:
        for name, hint in get_type_hints(command, include_extras=True).items():
            if name in WrapOptions.names():
                (info,) = hint.__metadata__
                # The command line has its own spelling of trees.
                sentence = "Draft lengths to build, 0 among them" if name == "tiers" else WrapOptions.sentence(name)
                assert info.help.startswith(sentence) and info.min == WrapOptions.least(name)
                shown.add(name)
    assert {"mode", "tiers", "backend", "weights"} <= shown


def test_the_command_line_has_the_defaults_of_the_options() -> None:
    for command in (commands.demo, commands.generate, commands.inspect):
        defaults = {name: parameter.default for name, parameter in inspect.signature(command).parameters.items()}
        assert (defaults["mode"], defaults["backend"]) == (DEFAULT_MODE, WrapOptions.backend)
        assert defaults["tiers"] in (None, TIERS)
        assert defaults.get("max_len") is WrapOptions.max_len


# --- checks --------------------------------------------------------------------------------------


def test_forms_of_weights_are_those_of_the_kernels() -> None:
    # Nothing is rounded to fp4: it holds checkpoints.
    assert {*WEIGHT_FORMS, "fp4"} == set(FORMS)
    for form in WEIGHT_FORMS:
        assert WrapOptions(weights=form).weights == form
        assert WrapOptions(weights={"lm_head": form}).weights == {"lm_head": form}


def test_tiers_are_kept_in_ascending_order_and_read_once() -> None:
    options = WrapOptions(tiers=iter((3, 0)))  # type: ignore[arg-type]
    assert options.tiers == options.draft_lens == (0, 3)
    assert WrapOptions().tiers is None and WrapOptions().draft_lens == DEFAULT_TIERS
    with raises(InvalidTiers, tiers=(1, 3), reason="0 is missing"):
        WrapOptions(tiers=(1, 3))


def test_a_policy_must_name_tiers_that_are_built() -> None:
    with raises(UnknownTier, tier=2, built="0, 3"):
        WrapOptions(tiers=(0, 3), policy="fixed:2")
    with raises(UnknownTier, tier=2, built="0, 1, 3, 7"):
        WrapOptions(policy="fixed:2")


def test_numpy_numbers_are_numbers() -> None:
    options = WrapOptions(max_batch=np.int64(2), tiers=np.array([0, 3]))  # type: ignore[arg-type]
    assert (options.max_batch, options.tiers) == (2, (0, 3)) and type(options.max_batch) is int

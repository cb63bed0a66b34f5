"""Options of saving hidden states: what is refused, what the usual layers are, and where nothing is saved."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaForCausalLM

from speccompile import Speculator, wrap
from speccompile.errors import CannotSave, InvalidOption
from speccompile.hidden_states import SaveHiddenStates
from speccompile.hidden_states.records import about
from support.errors import raises
from support.saved_states import LAYERS, wrapped
from support.tiny import tiny_llama

TINY = {"layers": 3}


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("output_directory", "", "path of a folder"),
        ("write_interval", 0, "at least 1"),
        ("file_prefix", "a/b", "beginning of a file's name"),
        ("eagle3_layers_to_capture", None, "the usual three layers"),
        ("eagle3_layers_to_capture", [3], "0 .. 2"),
        ("eagle3_layers_to_capture", [], "0 .. 2"),
        ("eagle3_layers_to_capture", 1.5, "0 .. 2"),
    ],
)
def test_saving_options_that_are_not_valid_are_refused(
    model: LlamaForCausalLM, tmp_path: Path, name: str, value: Any, reason: str
) -> None:
    given = {"output_directory": tmp_path, "eagle3_layers_to_capture": LAYERS} | {name: value}
    with raises(InvalidOption, name=name, value=value, reason=re.compile(reason)):
        wrap(model, "save_hidden_states", backend="eager", **given)


@pytest.fixture
def saving(model: LlamaForCausalLM, tmp_path: Path) -> Iterator[Speculator]:
    with wrapped(model, tmp_path / "saved", "none") as spec:
        yield spec


def test_options_that_do_not_go_together(model: LlamaForCausalLM, tmp_path: Path, saving: Speculator) -> None:
    with raises(InvalidOption, name="save_hidden_states", reason=re.compile("options of its own")):
        wrap(model, "save_hidden_states", output_directory=tmp_path, save_hidden_states=tmp_path)
    with raises(InvalidOption, name="save_hidden_states", reason=re.compile("give a folder")):
        wrap(model, save_hidden_states=7)  # type: ignore[arg-type]
    with raises(InvalidOption, name="output_directory", reason=re.compile("a process writes there")):
        wrapped(model, saving.hidden_states.folder, "none")
    with raises(CannotSave, name="save_hidden_states"):
        saving.save(tmp_path / "package")
    # Of the record that says what the folder's are about.
    saving.engine.submit([5, 6, 7], max_new_tokens=2, record="of another model").result()
    saving.hidden_states.flush()
    with raises(InvalidOption, name="output_directory", reason=re.compile("another folder")):
        wrap(
            tiny_llama(seed=1, layers=3),
            max_len=64,
            save_hidden_states=SaveHiddenStates(
                saving.hidden_states.folder, file_prefix="x", eagle3_layers_to_capture=LAYERS
            ),
        )


def test_the_usual_layers() -> None:
    assert SaveHiddenStates("folder").layers(tiny_llama(layers=8)) == (1, 3, 4)
    assert SaveHiddenStates("folder", eagle3_layers_to_capture={4, -1, 0}).layers(tiny_llama(layers=8)) == (0, 4, -1)


def test_rounded_weights_are_another_model_s(model: LlamaForCausalLM) -> None:
    options = SaveHiddenStates("folder", eagle3_layers_to_capture=LAYERS)
    assert about(model, options) == about(model, options, "same") != about(model, options, "int8")


def test_where_nothing_is_saved(model: LlamaForCausalLM, tmp_path: Path) -> None:
    sizes: dict[str, Any] = {"tiers": (0,), "max_len": 32, "backend": "eager"}
    with wrap(model, "none", **sizes) as spec:
        calls: list[tuple[Callable[[], Any], str]] = [
            (lambda: spec.hidden_states, "save_hidden_states"),
            (lambda: spec.save_hidden_states([[1]]), "save_hidden_states"),
            (lambda: spec.engine.submit([1], record="id"), "record"),
        ]
        for call, name in calls:
            with raises(InvalidOption, name=name):
                call()
        assert spec.engine.submit([1], max_new_tokens=1).result().token_ids

"""Heads that are written load again, and a head that speculators saved is written as speculators saved it."""

from __future__ import annotations

import json
import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from speccompile.errors import InvalidHead, InvalidOption
from speccompile.heads import Eagle3Head, load_eagle3, save_eagle3
from speccompile.hidden_states.target_id import target_id
from support.errors import raises
from support.published import SPECULATORS, write
from support.speculators_cases import head_tensors, target
from support.tiny import tiny_llama

#: Of transformers' layer configs, which engines read with these defaults.
LEFT_OUT = {"attention_dropout", "bos_token_id", "eos_token_id", "pad_token_id", "initializer_range", "pretraining_tp"}


@pytest.mark.parametrize("layout", ["speculators", "specforge"])
@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"draft_vocab_size": 128},
        {"norm_before_residual": True, "norm_output": True, "fc_norm": True},
        {"norm_before_fc": True, "taps": (0, 2, 5), "hidden_size": 32, "head_dim": 16},
        {"rope": {"rope_type": "linear", "factor": 2.0, "rope_theta": 5000.0}},
    ],
)
def test_a_written_head_is_the_one_that_loads(tmp_path: Path, layout: Any, fields: dict[str, Any]) -> None:
    model = tiny_llama(layers=8)
    head = Eagle3Head.random(model, **{"taps": (1, 3, 4), "draft_vocab_size": 40, **fields})
    save_eagle3(head, tmp_path, layout=layout, dtype=torch.float32)
    loaded = load_eagle3(tmp_path, model)
    assert loaded.config == head.config
    state, found = head.state_dict(), loaded.state_dict()
    assert state.keys() == found.keys() and all(torch.equal(state[name], found[name]) for name in state)
    shared = head.config.hidden_size == head.config.target_hidden_size
    assert ("embed_tokens.weight" in load_file(tmp_path / "model.safetensors")) != shared


def test_a_head_of_speculators_is_written_as_speculators_did(tmp_path: Path) -> None:
    case = SPECULATORS["cases"]["written ids"]
    tensors = head_tensors({key: tuple(shape) for key, (shape, _) in case["tensors"].items()})
    head = load_eagle3(write(tmp_path / "theirs", tensors, case["config"]), target())
    save_eagle3(head, tmp_path / "ours", dtype=torch.float32, draft_len=4)
    found = load_file(tmp_path / "ours" / "model.safetensors")
    assert found.keys() == tensors.keys() and all(torch.equal(found[key], tensors[key]) for key in tensors)
    config, theirs = json.loads((tmp_path / "ours" / "config.json").read_text()), dict(case["config"])
    layer = {key: value for key, value in theirs.pop("transformer_layer_config").items() if key not in LEFT_OUT}
    assert config.pop("transformer_layer_config") == {key: value for key, value in layer.items() if key != "use_cache"}
    assert config == {key: value for key, value in theirs.items() if key != "transformers_version"}


def test_the_target_can_be_named(tmp_path: Path) -> None:
    head = Eagle3Head.random(tiny_llama(layers=6))
    for name in (None, "someone/some-model"):
        save_eagle3(head, tmp_path, target_name=name)
        config = json.loads((tmp_path / "config.json").read_text())
        assert config["speculators_config"]["verifier"]["name_or_path"] == name


@pytest.mark.parametrize("layout", ["speculators", "specforge"])
def test_a_head_that_names_its_target_warns_beside_another(tmp_path: Path, layout: Any) -> None:
    model, other = tiny_llama(layers=8), tiny_llama(seed=1, layers=8)
    head = Eagle3Head.random(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        # Published heads name none.
        save_eagle3(head, tmp_path / "published", layout=layout)
        load_eagle3(tmp_path / "published", other)
        save_eagle3(head, tmp_path / "own", layout=layout, target_id=target_id(model))
        load_eagle3(tmp_path / "own", model)
    with pytest.warns(UserWarning, match=f"own was trained for the target {re.escape(target_id(model))}, and"):
        load_eagle3(tmp_path / "own", other)


def test_what_has_no_layout_is_refused(tmp_path: Path) -> None:
    model = tiny_llama(layers=8)
    with raises(InvalidOption, where="save_eagle3", name="layout", value="medusa"):
        save_eagle3(Eagle3Head.random(model), tmp_path, layout="medusa")  # type: ignore[arg-type]
    for fields in ({"num_hidden_layers": 2}, {"windows": (4,)}):
        with raises(InvalidHead):
            save_eagle3(Eagle3Head.random(model, **fields), tmp_path)

"""Refused checkpoints: the error has every reason why a folder is not an EAGLE-3 head for the target."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from speccompile.errors import HeadKeys, InvalidHead
from speccompile.graph_capture.model_info import inspect_model
from speccompile.heads import load_eagle3
from speccompile.modes.network.draft_models import load_draft
from support import published
from support.eagle3_checkpoints import TARGET, loaded, without
from support.errors import raises
from support.published import FLAT, HIDDEN, VOCAB
from support.tiny import tiny_llama


def test_every_bad_key_is_listed_in_one_error(tmp_path: Path) -> None:
    tensors = published.weights()
    tensors["midlayer.self_attn.query_proj.weight"] = tensors.pop("midlayer.self_attn.q_proj.weight")
    del tensors["midlayer.hidden_norm.weight"]
    tensors["eh_proj.weight"] = torch.ones(3, 5)
    tensors["midlayer.mlp.down_proj.weight"] = torch.ones(HIDDEN, 7)
    tensors["fc.weight"] = tensors["fc.weight"].to(torch.float8_e4m3fn)
    with raises(HeadKeys) as error:
        loaded(tmp_path, tensors)
    assert sorted(line.strip() for line in error.value.fields["problems"].splitlines() if line) == [
        "missing: layers.0.hidden_norm.weight [64]",
        "not known: eh_proj.weight [3, 5]",
        "of another kind: fc.weight is torch.float8_e4m3fn and must hold floating-point numbers",
        "of another shape: layers.0.mlp.down_proj.weight is [64, 7] and must be [64, 96]",
        "renamed: layers.0.self_attn.query_proj.weight [96, 128] looks like layers.0.self_attn.q_proj.weight",
    ]


@pytest.mark.parametrize("key", [*published.weights(), "embed_tokens.weight"])
def test_each_key_matters(tmp_path: Path, key: str) -> None:
    """Another name of any tensor is reported, and so is another shape."""
    tensors = published.weights() | {"embed_tokens.weight": published.embedding()}
    for folder, changed in (
        ("renamed", {**without(tensors, key), f"other.{key}": tensors[key]}),
        ("shape", {**tensors, key: tensors[key][:-1]}),
    ):
        with raises(HeadKeys, problems=re.compile(re.escape(key.replace("midlayer", "layers.0")))):
            loaded(tmp_path / folder, changed)


@pytest.mark.parametrize("key", [key for key in published.weights() if key not in ("t2d", "lm_head.weight")])
def test_a_missing_tensor_is_named(tmp_path: Path, key: str) -> None:
    missing = re.compile(f"missing: {re.escape(key.replace('midlayer', 'layers.0'))} ")
    with raises(HeadKeys, problems=missing):
        loaded(tmp_path, without(published.weights(), key))


def test_a_qwen3_layer_without_its_norms(tmp_path: Path) -> None:
    config = published.speculators({"model_type": "qwen3"})
    with raises(HeadKeys, problems=re.compile(r"missing: layers\.0\.self_attn\.q_norm\.weight \[24\]")):
        loaded(tmp_path, published.weights("layers.0"), config)


def test_lm_head_of_a_part_of_the_vocabulary_cannot_be_lent(tmp_path: Path) -> None:
    with raises(HeadKeys, problems=re.compile(r"missing: lm_head\.weight \[40, 64\]")):
        loaded(tmp_path, without(published.weights(), "lm_head.weight"))


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"vocab_size": VOCAB + 1}, "its vocabulary has 129 tokens, the target's 128"),
        ({"target_hidden_size": 32}, "hidden states of size 32"),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 2, 8]}}, "the target has 0 .. 7"),
        ({"eagle_config": {"eh_proj_before_attn": True}}, "eh_proj_before_attn"),
        ({"kv_lora_rank": 16}, "latent attention"),
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, "rotary table"),
        ({"hidden_size": None}, "hidden_size in its config must be a size, got None"),
        ({"speculators_model_type": "mtp"}, "'mtp'"),
        ({"hidden_act": "nonsense"}, "nonsense"),
        ({"fc_norm": True, "norm_before_fc": True}, "both"),
        ({"rms_norm_eps": "small"}, "rms_norm_eps in its config must be a number above 0, got 'small'"),
        ({"rope_theta": "10000"}, "rope_theta in its config must be a number above 0, got '10000'"),
        ({"rope_scaling": "linear"}, "the rotary parameters in its config must be an object, got 'linear'"),
        ({"rope_scaling": {"type": "linear"}}, "cannot create its rotary table from .*factor"),
        ({"rope_scaling": {"rope_type": "nonsense"}}, "cannot create its rotary table"),
        ({"head_dim": 23}, "cannot create its rotary table"),
        ({"eagle_config": [1]}, r"eagle_config in its config must be an object, got \[1\]"),
        ({"norm_before_residual": "false"}, "norm_before_residual in its config must be true or false, got 'false'"),
    ],
)
def test_a_config_that_does_not_fit_is_refused_with_the_reason(
    tmp_path: Path, changed: dict[str, Any], reason: str
) -> None:
    with raises(InvalidHead, reason=re.compile(reason)):
        loaded(tmp_path, published.weights(), FLAT | changed)


@pytest.mark.parametrize(
    ("layer", "fields", "reason"),
    [
        ({}, {"eagle_aux_hidden_state_layer_ids": [2, 4, 9]}, r"outputs of layers \[1, 3, 8\], and .* 0 .. 7"),
        ({}, {"eagle_aux_hidden_state_layer_ids": [-1, 4, 5]}, r"outputs of layers \[-2, 3, 4\]"),
        (
            {},
            {"eagle_aux_hidden_state_layer_ids": 2},
            "eagle_aux_hidden_state_layer_ids in its config must be a list of layers, got 2",
        ),
        ({"model_type": "mistral"}, {}, "model_type of its layers must be 'llama' or 'qwen3' .*, got 'mistral'"),
        ({"layer_types": ["sliding_attention"]}, {}, "sliding_window in its config must be a size, got None"),
        (
            {"layer_types": ["chunked_attention"]},
            {},
            r"layer_types in its config must name .*, got \['chunked_attention'\]",
        ),
        ({"layer_types": []}, {}, "must name one of .* for each layer"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 9.0}}}, {}, r"by kind of layer \(full_attention\)"),
    ],
)
def test_speculators_config_refused(tmp_path: Path, layer: dict[str, Any], fields: dict[str, Any], reason: str) -> None:
    with raises(InvalidHead, reason=re.compile(reason)):
        loaded(tmp_path, published.weights("layers.0"), published.speculators(layer, **fields))


def test_a_tensor_that_the_config_asks_for_is_missed(tmp_path: Path) -> None:
    with raises(HeadKeys, problems=re.compile(r"missing: layers.0.self_attn.q_proj.bias \[96\]")):
        loaded(tmp_path, published.weights(), FLAT | {"attention_bias": True})


def test_vocabulary_refused(tmp_path: Path) -> None:
    tensors = published.weights()
    with raises(InvalidHead, reason=re.compile("t2d does not mark")):
        loaded(tmp_path / "t2d", tensors | {"t2d": ~tensors["t2d"]})
    with raises(InvalidHead, reason=re.compile("would be token")):
        loaded(tmp_path / "outside", tensors | {"d2t": tensors["d2t"] + VOCAB})
    whole = tensors | {"lm_head.weight": torch.ones(VOCAB, HIDDEN), "t2d": torch.ones(VOCAB, dtype=torch.bool)}
    whole["d2t"] = torch.arange(VOCAB).flip(0) - torch.arange(VOCAB)
    with raises(InvalidHead, reason=re.compile("d2t must be 0")):
        loaded(tmp_path / "whole", whole, FLAT | {"draft_vocab_size": VOCAB})


def eagle1(folder: Path) -> Path:
    """A checkpoint of EAGLE's first generation: its config is that of a Llama with one layer."""
    tensors = {
        key: value[:, :HIDDEN].clone() if value.shape[-1] == 2 * HIDDEN else value
        for key, value in published.weights("layers.0").items()
        if key.startswith("layers.") and not key.endswith(("input_layernorm.weight", "hidden_norm.weight"))
    }
    tensors |= {"fc.weight": torch.ones(HIDDEN, 2 * HIDDEN), "fc.bias": torch.ones(HIDDEN)}
    return published.write(folder, tensors, {key: value for key, value in FLAT.items() if key != "draft_vocab_size"})


def test_heads_of_other_kinds_are_named(tmp_path: Path) -> None:
    with raises(InvalidHead, reason=re.compile("^it is an EAGLE-1 or EAGLE-2 head")):
        load_eagle3(eagle1(tmp_path / "1"), TARGET)
    with raises(InvalidHead, reason=re.compile("^it is an EAGLE-1 or EAGLE-2 head")):
        load_draft(str(tmp_path / "1"), inspect_model(TARGET))
    for fields, tensors, reason in (
        ({"eagle_config": {"use_aux_hidden_state": False}}, {}, "a head without auxiliary hidden states"),
        ({"eagle_config": {"parallel_draft_step": 4}}, {}, "parallel_draft_step=4"),
        ({"speculators_model_type": "dflash"}, {}, "a DFlash or DSpark head; use mode='dflash'"),
        ({"medusa_num_heads": 3}, {}, "Medusa heads; use mode='medusa'"),
        ({}, {"mask_hidden": torch.ones(1, 1, HIDDEN)}, "a P-EAGLE head, .* parallel_drafting=true"),
    ):
        folder = published.write(tmp_path / reason[:9], published.weights("layers.0") | tensors, FLAT | fields)
        with raises(InvalidHead, reason=re.compile(reason)):
            load_eagle3(folder, TARGET)


def test_two_names_of_one_tensor(tmp_path: Path) -> None:
    tensors = published.weights()
    with raises(InvalidHead, reason=re.compile("two names")):
        loaded(tmp_path, tensors | {"layers.0.hidden_norm.weight": torch.ones(HIDDEN)})


def test_files_that_are_no_checkpoint(tmp_path: Path) -> None:
    tensors = published.weights()
    published.write(tmp_path / "twice", tensors, FLAT, files=2)
    with raises(InvalidHead, reason=re.compile(r"is in model\.safetensors and in another file")):
        loaded(tmp_path / "twice", tensors)
    for saved, reason in (
        ([1, 2], "cannot be read"),
        ({"state_dict": tensors}, "'state_dict' must be a tensor, got a dict"),
    ):
        folder = published.write(tmp_path / type(saved).__name__, tensors, FLAT, binary=True)
        torch.save(saved, folder / "pytorch_model.bin")
        with raises(InvalidHead, reason=re.compile(reason)):
            load_eagle3(folder, TARGET)


def test_a_folder_without_a_checkpoint_is_refused(tmp_path: Path) -> None:
    with raises(InvalidHead, source=str(tmp_path), reason=re.compile(r"config\.json|safetensors")):
        load_eagle3(tmp_path, TARGET)
    (tmp_path / "pytorch_model.bin").write_bytes(b"no pickle")
    with raises(InvalidHead, reason=re.compile("cannot be read")):
        load_eagle3(tmp_path, TARGET)


def test_a_small_target_has_no_usual_layers(tmp_path: Path) -> None:
    folder = published.write(tmp_path, published.weights(), FLAT)
    with raises(InvalidHead, reason=re.compile("more than 5")):
        load_eagle3(folder, tiny_llama(layers=5))

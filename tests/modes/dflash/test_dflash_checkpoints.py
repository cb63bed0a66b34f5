"""DFlash heads in files: written and read again, z-lab's layout, and what is not a head of the target."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaForCausalLM

from speccompile import wrap
from speccompile.errors import HeadKeys, InvalidHead
from speccompile.heads import DFlashConfig, DFlashHead, load_dflash, save_dflash
from support.errors import raises
from support.tiny import greedy, random_prompt, tiny_llama

MASK = 7
TINY = {"layers": 4}


def head_of(model: LlamaForCausalLM, **fields: Any) -> DFlashHead:
    sizes: dict[str, Any] = {"block_size": 4, "num_hidden_layers": 2, "taps": (2, 0)}
    return DFlashHead.random(model, MASK, **(sizes | fields))


@pytest.fixture(scope="module")
def head(model: LlamaForCausalLM) -> DFlashHead:
    return head_of(model)


def assert_same(one: DFlashHead, other: DFlashHead) -> None:
    assert one.config == other.config
    states = one.own_state(), other.own_state()
    assert states[0].keys() == states[1].keys()
    assert all(torch.equal(value, states[1][key]) for key, value in states[0].items())


def zlab(head: DFlashHead, folder: Path, **config: Any) -> Path:
    """Weights and config as z-lab publishes them."""
    own = head.config
    base = {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "hidden_size": own.hidden_size,
        "intermediate_size": own.intermediate_size,
        "num_attention_heads": own.num_attention_heads,
        "num_key_value_heads": own.num_key_value_heads,
        "num_hidden_layers": own.num_hidden_layers,
        "head_dim": own.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": own.rms_norm_eps,
        "max_position_embeddings": own.max_position_embeddings,
        "rope_theta": own.rope["rope_theta"],
        "rope_scaling": None,
        "attention_bias": own.attention_bias,
        "vocab_size": 128,
        "block_size": own.block_size,
        "dflash_config": {"mask_token_id": own.mask_token_id, "target_layer_ids": list(own.taps)},
    }
    base |= {key: value for key, value in config.items() if key != "dflash_config"}
    base["dflash_config"] |= config.get("dflash_config", {})
    (folder / "config.json").write_text(json.dumps(base))
    save_file({key: value.clone() for key, value in head.own_state().items()}, folder / "model.safetensors")
    return folder


def edited(folder: Path, **config: Any) -> Path:
    """A config with other values; None removes a key."""
    keys = json.loads((folder / "config.json").read_text()) | config
    (folder / "config.json").write_text(json.dumps({key: value for key, value in keys.items() if value is not None}))
    return folder


@pytest.mark.parametrize("fields", [{}, {"windows": (9, None), "head_dim": 12}], ids=["plain", "windows"])
def test_what_was_written_is_read(model: LlamaForCausalLM, tmp_path: Path, fields: dict[str, Any]) -> None:
    own = head_of(model, **fields)
    save_dflash(own, tmp_path, dtype=torch.float32)
    assert_same(load_dflash(tmp_path, model), own)


def test_half_precision_and_a_mode_that_loads(model: LlamaForCausalLM, head: DFlashHead, tmp_path: Path) -> None:
    save_dflash(head, tmp_path)
    assert load_file(tmp_path / "model.safetensors")["encoder.fc.weight"].dtype == torch.float16
    sizes: dict[str, Any] = {"tiers": (0, 3), "policy": "fixed:3", "max_batch": 1, "max_len": 31, "backend": "eager"}
    with wrap(model, "dflash", draft=str(tmp_path), **sizes) as spec:
        assert "layers 2, 0 drafts 3 tokens in one forward" in spec.explain()
        assert "computed inside the step, by one forward" in spec.explain()
        prompt = random_prompt(9)
        assert spec.generate(torch.tensor([prompt]), max_new_tokens=12)[0, 9:].tolist() == greedy(model, prompt, 12)


def test_a_target_in_half_precision(tmp_path: Path) -> None:
    """Rotary frequencies stay in float32."""
    target = tiny_llama(layers=4, dtype=torch.bfloat16)
    own = head_of(target)
    assert own.fc.weight.dtype == torch.bfloat16 and own.rotary.inv_freq.dtype == torch.float32
    save_dflash(own, tmp_path, dtype=torch.bfloat16)
    assert_same(load_dflash(tmp_path, target), own)


LAYERS = ["sliding_attention", "full_attention"]
ZLAB: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {}),
    "sliding layers are causal": (
        {"layer_types": LAYERS, "sliding_window": 9},
        {"windows": (9, None), "causal": (True, False)},
    ),
    "unless it says": (
        {"layer_types": LAYERS, "sliding_window": 9, "is_causal": False},
        {"windows": (9, None)},
    ),
    "vLLM's keys": (
        {"dflash_config": {"use_swa": True, "swa_window_size": 5, "causal": False}},
        {"windows": (5, 5)},
    ),
    "scales": (
        {"dflash_config": {"input_embedding_scale": 8.0, "output_multiplier": 0.5}, "final_logit_softcapping": 30.0},
        {"embedding_scale": 8.0, "logit_scale": 0.5, "logit_softcap": 30.0},
    ),
    "biases, and the size of the block below": (
        {"attention_bias": True, "block_size": None, "dflash_config": {"block_size": 4}},
        {"attention_bias": True},
    ),
}


@pytest.mark.parametrize("name", ZLAB)
def test_the_layout_of_zlab(model: LlamaForCausalLM, tmp_path: Path, name: str) -> None:
    config, fields = ZLAB[name]
    own = head_of(model, **fields)
    assert_same(load_dflash(zlab(own, tmp_path, **config), model), own)


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"dflash_config": {"conv_kernel_size": 9}}, "conv_kernel_size 9 is more than its block_size"),
        ({"dflash_config": {"conv_kernel_size": 2, "conv_group_size": 48}}, "48 does not divide its hidden_size 64"),
        ({"dflash_config": {"selector_rank": 4, "markov_rank": 3}}, "a candidate selector with"),
        ({"dflash_config": {"attention_sink_bias": True}}, "attention sinks"),
        ({"is_neox_style": False}, "pairs side by side"),
        ({"vocab_size": 100}, "another target: its vocabulary has 100"),
        ({"dflash_config": {"target_layer_ids": [0, 4]}}, r"layers \[0, 4\], and the target has 0 .. 3"),
        ({"dflash_config": {"target_layer_ids": None}}, "target_layer_ids"),
        ({"dflash_config": {"mask_token_id": 128}}, "embeds 128 tokens"),
        ({"dflash_config": {"mask_token_id": None}}, "mask_token_id in its config must be a token, got None"),
        ({"block_size": 1}, "block_size must be at least 2, got 1"),
        ({"hidden_size": 32}, "of size 32, the target's of 64"),
        ({"layer_types": ["linear_attention"] * 2}, "layer_types"),
        ({"layer_types": LAYERS}, "sliding_window in its config must be a size, got None"),
        ({"rope_scaling": {"rope_type": "longrope"}}, "depends on the sequence's length"),
    ],
)
def test_configs_that_are_refused(
    model: LlamaForCausalLM, head: DFlashHead, tmp_path: Path, config: dict[str, Any], reason: str
) -> None:
    with raises(InvalidHead, reason=re.compile(reason)):
        load_dflash(zlab(head, tmp_path, **config), model)


def test_a_config_of_something_else(model: LlamaForCausalLM, head: DFlashHead, tmp_path: Path) -> None:
    with raises(InvalidHead, reason=re.compile("not a DFlash head")):
        load_dflash(edited(zlab(head, tmp_path), dflash_config=None), model)


def test_tensors_that_do_not_fit_are_named(model: LlamaForCausalLM, head: DFlashHead, tmp_path: Path) -> None:
    save_dflash(head, tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["encoder.fc.weight"]
    tensors["layers.1.mlp.up_proj.weight"] = torch.zeros(3, 3)
    tensors["layers.0.self_attn.attention_sink_bias"] = torch.zeros(4)
    save_file(tensors, tmp_path / "model.safetensors")
    problems = r"not known: layers\.0\.self_attn\.attention_sink_bias \[4\]\n  missing: fc\.weight \[64, 128\]\n"
    problems += r"  of another shape: layers\.1\.mlp\.up_proj\.weight is \[3, 3\]"
    with raises(HeadKeys, problems=re.compile(problems)):
        load_dflash(tmp_path, model)


def test_what_transformers_class_cannot_be_is_not_written(model: LlamaForCausalLM, tmp_path: Path) -> None:
    for fields in ({"causal": (True, False)}, {"logit_scale": 0.5}, {"attention_bias": True}, {"windows": (3, 4)}):
        with raises(InvalidHead, reason=re.compile("assistant model")):
            save_dflash(head_of(model, **fields), tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"num_hidden_layers": 0}, "no layer"),
        ({"hidden_act": "nothing"}, "no activation"),
        ({"num_key_value_heads": 3}, "cannot share"),
        ({"windows": (3,)}, "windows of 1"),
        ({"windows": (3, 0)}, "None or sizes"),
        ({"causal": (True,)}, "causal of 1"),
    ],
)
def test_configs_that_contradict_themselves(model: LlamaForCausalLM, fields: dict[str, Any], reason: str) -> None:
    with raises(InvalidHead, reason=re.compile(reason)):
        head_of(model, **fields)


@pytest.mark.parametrize(("layers", "taps"), [(1, (0,)), (2, (1,)), (4, (1,)), (6, (1, 2)), (36, (1, 9, 16, 24, 32))])
def test_taps_of_a_head_without_any(layers: int, taps: tuple[int, ...]) -> None:
    assert DFlashConfig.for_target(tiny_llama(layers=layers), MASK).taps == taps

"""Block heads in the layouts of speculators (DFlash, DSpark), DeepSpec and SpecForge."""

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
from speccompile.errors import InvalidHead
from speccompile.heads import DFlashHead, load_dflash, save_dflash
from support.errors import raises
from support.tiny import greedy, random_prompt, tiny_llama

TINY = {"layers": 4}
DSPARK: dict[str, Any] = {"markov_rank": 4, "sample_from_anchor": True, "draft_vocab_size": 40}


def head_of(model: LlamaForCausalLM, **fields: Any) -> DFlashHead:
    sizes: dict[str, Any] = {"block_size": 4, "num_hidden_layers": 2, "taps": (0, 2)}
    return DFlashHead.random(model, 7, **(sizes | fields))


def assert_same(one: DFlashHead, other: DFlashHead) -> None:
    assert one.config == other.config
    states = one.own_state(), other.own_state()
    assert states[0].keys() == states[1].keys()
    assert all(torch.equal(value, states[1][key]) for key, value in states[0].items())


def edited(folder: Path, **config: Any) -> Path:
    """A config with other values; None removes a key."""
    keys = json.loads((folder / "config.json").read_text()) | config
    (folder / "config.json").write_text(json.dumps({key: value for key, value in keys.items() if value is not None}))
    return folder


def with_tensors(folder: Path, **tensors: torch.Tensor) -> Path:
    file = folder / "model.safetensors"
    save_file(load_file(file) | {name.replace("__", "."): value for name, value in tensors.items()}, file)
    return folder


@pytest.mark.parametrize(
    "fields",
    [
        {"draft_vocab_size": 40},
        {"markov_rank": 4},
        {"sample_from_anchor": True},
        DSPARK,
        DSPARK | {"windows": (9, None), "causal": (True, False)},
        DSPARK | {"windows": (9, 9), "attention_bias": True, "rope": {"rope_type": "default", "rope_theta": 5e5}},
    ],
    ids=["vocabulary", "markov", "anchor", "all", "causal windows", "windows"],
)
def test_what_was_written_is_read(model: LlamaForCausalLM, tmp_path: Path, fields: dict[str, Any]) -> None:
    own = head_of(model, **fields)
    save_dflash(own, tmp_path, dtype=torch.float32, target_id="Llama-1")
    with pytest.warns(UserWarning, match="was trained for the target Llama-1"):
        assert_same(load_dflash(tmp_path, model), own)


def test_a_mode_loads_one(model: LlamaForCausalLM, tmp_path: Path) -> None:
    save_dflash(head_of(model, **DSPARK), tmp_path)
    sizes: dict[str, Any] = {"tiers": (0, 4), "policy": "fixed:4", "max_batch": 1, "max_len": 31, "backend": "eager"}
    for mode in ("dflash", "auto"):
        with wrap(model, mode, draft=str(tmp_path), **sizes) as spec:
            assert "a DFlash head with a Markov term over the outputs of layers 0, 2 drafts 4 tokens" in spec.explain()
            prompt = random_prompt(9)
            assert spec.generate(torch.tensor([prompt]), max_new_tokens=12)[0, 9:].tolist() == greedy(model, prompt, 12)


#: What speculators 0.9 writes for a head of the sizes of :func:`head_of`: its layer's config leaves out the defaults of
#: transformers' Qwen3 config, and options without a value are null.
WRITTEN: dict[str, Any] = {
    "architectures": ["DSparkDraftModel"],
    "aux_hidden_state_layer_ids": [1, 3],
    "block_size": 4,
    "confidence_head_with_markov": True,
    "draft_vocab_size": 40,
    "enable_confidence_head": True,
    "markov_head_type": "vanilla",
    "markov_rank": 4,
    "mask_token_id": 7,
    "sample_from_anchor": True,
    "sliding_window_non_causal": False,
    "speculators_model_type": "dspark",
    "target_hidden_size": None,
    "transformer_layer_config": {
        "model_type": "qwen3",
        "vocab_size": 128,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 2048,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    },
}


def test_a_head_of_speculators(model: LlamaForCausalLM, tmp_path: Path) -> None:
    """With what its training leaves in the file: a confidence head, and copies of the target's weights."""
    own = head_of(model, **DSPARK)
    save_dflash(own, tmp_path, dtype=torch.float32)
    (tmp_path / "config.json").write_text(json.dumps(WRITTEN))
    with_tensors(
        tmp_path,
        confidence_head__proj__weight=torch.zeros(1, 68),
        confidence_head__proj__bias=torch.zeros(1),
        embed_tokens__weight=model.get_input_embeddings().weight.detach().bfloat16(),
    )
    assert_same(load_dflash(tmp_path, model), own)


@pytest.mark.parametrize("layout", ["DeepSpec", "SpecForge"])
def test_heads_of_other_trainers(model: LlamaForCausalLM, tmp_path: Path, layout: str) -> None:
    own = head_of(model, markov_rank=4, sample_from_anchor=True)
    save_dflash(own, tmp_path, dtype=torch.float32)
    flat = {**WRITTEN["transformer_layer_config"], "block_size": 4, "markov_rank": 4, "markov_head_type": "vanilla"}
    variants = {"mask_token_id": 7, "target_layer_ids": [0, 2]}
    if layout == "DeepSpec":
        config = flat | variants | {"architectures": ["Qwen3DSparkModel"], "num_anchors": 512}
    else:
        config = flat | {
            "architectures": ["DSparkDraftModel"],
            "dflash_config": variants | {"projector_type": "dspark"},
        }
    (tmp_path / "config.json").write_text(json.dumps(config))
    with_tensors(tmp_path, lm_head__weight=model.get_output_embeddings().weight.detach().clone())
    assert_same(load_dflash(tmp_path, model), own)


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"markov_head_type": "gated"}, "markov_head_type='gated'; only 'vanilla'"),
        ({"markov_rank": -1}, "markov_rank in its config must be"),
        ({"aux_hidden_state_layer_ids": [0, 2]}, r"layers \[-1, 1\], and the target has 0 .. 3"),
        ({"draft_vocab_size": 200}, "its draft_vocab_size is 200, and must be less than the target's 128 tokens"),
        ({"transformer_layer_config": {"hidden_size": "64"}}, "its transformer_layer_config is not valid"),
        ({"transformer_layer_config": {"layer_types": ["foo"]}}, "its transformer_layer_config is not valid"),
        ({"transformer_layer_config": {"model_type": "llama"}}, "must be 'qwen3' in speculators' layout, got 'llama'"),
    ],
)
def test_configs_that_are_refused(model: LlamaForCausalLM, tmp_path: Path, config: dict[str, Any], reason: str) -> None:
    save_dflash(head_of(model, **DSPARK), tmp_path)
    with raises(InvalidHead, reason=re.compile(reason)):
        load_dflash(edited(tmp_path, **config), model)


def test_tensors_that_are_refused(model: LlamaForCausalLM, tmp_path: Path) -> None:
    save_dflash(head_of(model, **DSPARK), tmp_path)
    other = tiny_llama(layers=4, seed=9).get_input_embeddings().weight.detach()
    with raises(InvalidHead, reason="its embed_tokens.weight is not that of this target"):
        load_dflash(with_tensors(tmp_path, embed_tokens__weight=other), model)
    save_dflash(head_of(model, **DSPARK), tmp_path)
    with raises(InvalidHead, reason=re.compile("t2d does not mark")):
        load_dflash(with_tensors(tmp_path, t2d=torch.ones(128, dtype=torch.bool)), model)
    save_dflash(head_of(model, **DSPARK), tmp_path)
    with raises(InvalidHead, reason=re.compile("draft token 0 would be token 500")):
        load_dflash(with_tensors(tmp_path, d2t=torch.full((40,), 500)), model)


def test_what_the_layout_does_not_have_is_not_written(model: LlamaForCausalLM, tmp_path: Path) -> None:
    for fields in ({"logit_scale": 0.5}, {"windows": (3, 4)}, {"causal": (True, False)}):
        with raises(InvalidHead, reason=re.compile("speculators' layout has no")):
            save_dflash(head_of(model, **DSPARK, **fields), tmp_path)
    assert not list(tmp_path.iterdir())

"""FP8 checkpoints: dequantised with their scales, in every layout, or refused."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen3MoeConfig, Qwen3MoeForCausalLM

import speccompile
from speccompile import pretrained
from speccompile.errors import DamagedCheckpoint, InvalidOption, SpecCompileError, UnsupportedCheckpoint
from speccompile.utils.dequantised import dequantised_from
from support.errors import raises
from support.float8_folders import LAYOUTS, Tensors, write_float8
from support.tiny import tiny_llama

FIRST = "model.layers.0.self_attn.q_proj"


def assert_equal(model: PreTrainedModel, reference: PreTrainedModel) -> None:
    expected = reference.state_dict()
    assert model.state_dict().keys() == expected.keys()
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, expected[name].to(tensor.dtype)), name


@pytest.mark.parametrize("name", LAYOUTS)
def test_weights_are_the_products_of_values_and_scales(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    reference = write_float8(tiny_llama(), tmp_path, name)
    model = pretrained.load_model(str(tmp_path))
    assert model.dtype == torch.float32 and not model.training
    assert_equal(model, reference)
    # transformers reports scales that it is given and does not know.
    assert caplog.text == ""
    assert not hasattr(model.config, "quantization_config")


@pytest.mark.parametrize(
    ("declared", "given", "loaded"),
    [
        ("bfloat16", "auto", torch.bfloat16),
        (None, "auto", torch.bfloat16),
        ("float16", "auto", torch.float16),
        ("bfloat16", "float32", torch.float32),
        ("float32", torch.bfloat16, torch.bfloat16),
    ],
)
def test_weights_have_the_dtype_of_the_config_or_the_given_one(
    declared: str | None, given: Any, loaded: torch.dtype, tmp_path: Path
) -> None:
    reference = write_float8(tiny_llama(layers=1), tmp_path, "modelopt", dtype=declared)
    model = pretrained.load_model(str(tmp_path), dtype=given)
    assert {tensor.dtype for tensor in model.parameters()} == {loaded}
    assert_equal(model, reference)


def test_experts_of_a_checkpoint_are_joined_after_they_are_dequantised(tmp_path: Path) -> None:
    config = Qwen3MoeConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=32,
        moe_intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        num_experts=4,
        num_experts_per_tok=2,
    )
    reference = write_float8(Qwen3MoeForCausalLM(config), tmp_path, "blocks")
    assert_equal(pretrained.load_model(str(tmp_path)), reference)


def test_the_text_is_that_of_the_dequantised_weights_and_the_report_names_the_format(tmp_path: Path) -> None:
    reference = write_float8(tiny_llama(), tmp_path, "modelopt in its own file")
    prompt = torch.tensor([[5, 9, 23, 9, 5, 9, 23]])
    with speccompile.wrap(
        pretrained.load_model(str(tmp_path)), "ngram", tiers=(0, 3), max_len=64, backend="eager"
    ) as spec:
        expected = reference.generate(prompt, max_new_tokens=24, do_sample=False, pad_token_id=0)
        assert spec.generate(prompt, max_new_tokens=24).tolist() == expected.tolist()
        (weights,) = re.findall("^weights .*", spec.explain(), re.MULTILINE)
        assert "stored as FP8 (modelopt) and dequantised to float32" in weights
        assert "load_quantized" not in weights, "it would refuse them"


def test_a_model_that_transformers_dequantised_is_known(tmp_path: Path) -> None:
    """Its quantiser removes itself, so that only the checkpoint says which format it had."""
    reference = write_float8(tiny_llama(layers=1), tmp_path, "Mistral")
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    assert (dequantised_from(model), dequantised_from(reference)) == ("fp8", "")
    (tmp_path / "config.json").unlink()
    assert dequantised_from(model) == "a quantised checkpoint"


# --- refused ----------------------------------------------------------------------------------------------------------


def refused(folder: Path, kind: type[SpecCompileError] = UnsupportedCheckpoint) -> str:
    with raises(kind) as error:
        pretrained.load_model(str(folder))
    reason: str = error.value.fields["reason"]
    return reason


@pytest.mark.parametrize(
    ("tensor", "value", "reason"),
    [
        (f"{FIRST}.weight_scale", None, "its scales .* are missing"),
        (f"{FIRST}.weight_scale_inv", torch.tensor(1.0), "it has both"),
        (f"{FIRST}.weight_scale", torch.ones(3), r"it is \[64, 64\] with scales of \[3\]"),
        (f"{FIRST}.weight_scale", torch.ones(2, 2), r"with scales of \[2, 2\]"),
        (f"{FIRST}.weight_scale", torch.tensor(1), "it is torch.int64"),
        (f"{FIRST}.weight_scale_2", torch.tensor(1.0), "no scale of that name is read"),
        (f"{FIRST}.pre_quant_scale", torch.ones(64), "no scale of that name is read"),
        (f"{FIRST}.weight", torch.zeros(64, 32, dtype=torch.uint8), "it is U8, and belongs to no float8 weight"),
        ("lm_head.weight_scale", torch.tensor(1.0), "lm_head.weight would be loaded without it"),
        ("model.norm.weight", None, "it lacks 1 tensors of a LlamaForCausalLM"),
        ("model.norm.weight", torch.ones(3), "in another shape"),
    ],
)
def test_tensors_that_would_be_read_as_other_numbers_are_refused(
    tensor: str, value: torch.Tensor | None, reason: str, tmp_path: Path
) -> None:
    def change(tensors: Tensors) -> None:
        if value is None:
            del tensors[tensor]
        else:
            tensors[tensor] = value

    write_float8(tiny_llama(), tmp_path, "modelopt", change)
    assert re.search(reason, refused(tmp_path))


def test_a_scale_that_is_not_finite_is_damaged(tmp_path: Path) -> None:
    def change(tensors: Tensors) -> None:
        tensors[f"{FIRST}.weight_scale"] = torch.tensor(float("nan"))

    write_float8(tiny_llama(), tmp_path, "modelopt", change)
    assert "not a finite number" in refused(tmp_path, DamagedCheckpoint)


@pytest.mark.parametrize(
    ("quantization", "reason"),
    [
        ({"quant_method": "modelopt", "quant_algo": "NVFP4_AWQ"}, "'modelopt': NVFP4_AWQ, an unknown scheme"),
        ({"quant_method": "modelopt", "quant_algo": "W4A8_AWQ"}, "'modelopt': W4A8_AWQ, an unknown scheme"),
        ({"quant_method": "modelopt"}, "'modelopt': None, an unknown scheme"),
        ({"quant_method": "exl2", "bits": 4.0}, "'exl2': .* several widths"),
        ({"quant_method": "something-new"}, "'something-new': an unknown format"),
        ({"group_size": 32, "bits": 4}, "no quant_method"),
        ({"quant_method": "fp8", "weight_block_size": [128]}, r"the blocks of its scales are \[\[128\]\]"),
    ],
)
def test_schemes_without_a_reader_are_refused(quantization: dict[str, Any], reason: str, tmp_path: Path) -> None:
    write_float8(tiny_llama(layers=1), tmp_path, "modelopt", quantization_config=None)
    fields = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(fields | {"quantization_config": quantization}))
    assert re.search(reason, refused(tmp_path))
    del fields["quantization_config"]
    (tmp_path / "config.json").write_text(json.dumps(fields | {"text_config": {"quantization_config": quantization}}))
    assert re.search(reason, refused(tmp_path))


def test_modelopts_own_file_is_refused_where_its_scheme_has_no_reader(tmp_path: Path) -> None:
    write_float8(tiny_llama(layers=1), tmp_path, "modelopt in its own file")
    (tmp_path / "hf_quant_config.json").write_text(json.dumps({"quantization": {"quant_algo": "NVFP4_AWQ"}}))
    assert "NVFP4_AWQ" in refused(tmp_path)
    (tmp_path / "hf_quant_config.json").write_text("[]")
    assert "hf_quant_config.json must be a mapping" in refused(tmp_path, DamagedCheckpoint)


def test_integers_of_an_fp8_checkpoint_name_what_loads_it(tmp_path: Path) -> None:
    write_float8(tiny_llama(layers=1), tmp_path, "compressed-tensors per tensor")
    with raises(UnsupportedCheckpoint, advice=re.compile("speccompile.pretrained.load, which dequantises it")):
        pretrained.load_quantized(tmp_path)


def test_a_quantised_checkpoint_is_not_sharded(tmp_path: Path) -> None:
    write_float8(tiny_llama(layers=1), tmp_path, "modelopt")
    with raises(InvalidOption, where="load", name="ranks", value=2):
        pretrained.load_model(str(tmp_path), ranks=2)


# --- without a declared scheme ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tensors", "reason"),
    [
        ({f"{FIRST}.weight": torch.zeros(64, 64, dtype=torch.float8_e4m3fn)}, "it is F8_E4M3"),
        ({f"{FIRST}.weight": torch.zeros(64, 32, dtype=torch.uint8)}, "it is U8"),
        ({f"{FIRST}.weight": torch.zeros(64, 8, dtype=torch.uint32)}, "it is U32"),
        ({f"{FIRST}.weight_scale": torch.ones(64, 1)}, "q_proj.weight would be loaded without it"),
        ({f"{FIRST}.scales": torch.ones(64, 2)}, "q_proj.weight would be loaded without it"),
        ({f"{FIRST}.weight.absmax": torch.ones(64)}, "q_proj.weight would be loaded without it"),
    ],
)
def test_quantised_weights_that_no_config_declares_are_refused(tensors: Tensors, reason: str, tmp_path: Path) -> None:
    write_plain(tmp_path, tensors)
    assert re.search(reason, refused(tmp_path))


def test_integers_and_scales_that_are_not_of_weights_are_left_out(tmp_path: Path) -> None:
    """Masks and positions of old versions, layers that the model does not have, and a KV cache that is rounded."""
    layer = "model.layers.7.mlp.up_proj"
    tensors = {
        "model.layers.0.self_attn.bias": torch.ones(1, 1, 8, 8, dtype=torch.uint8),
        "model.position_ids": torch.arange(8)[None],
        **{f"{layer}.weight": torch.ones(4, 4), f"{layer}.weight_scale": torch.tensor(1.0)},
        "model.layers.0.self_attn.k_proj.k_scale": torch.tensor(0.1),
    }
    reference = write_plain(tmp_path, tensors)
    (tmp_path / "hf_quant_config.json").write_text(
        json.dumps({"quantization": {"quant_algo": None, "kv_cache_quant_algo": "FP8"}})
    )
    assert_equal(pretrained.load_model(str(tmp_path)), reference)


def write_plain(folder: Path, tensors: Tensors) -> PreTrainedModel:
    """A checkpoint that is not quantised, with these tensors in it."""
    from safetensors.torch import load_file, save_file

    model = tiny_llama()
    model.save_pretrained(folder)
    file = folder / "model.safetensors"
    save_file({**load_file(file), **tensors}, file, {"format": "pt"})
    return model

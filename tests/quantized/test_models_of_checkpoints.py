"""Models of quantised checkpoints: dequantised, whose text is transformers', and without memory for the weights."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from transformers import AutoModelForCausalLM, LlamaForCausalLM, PreTrainedModel

import speccompile
from speccompile import pretrained, quantized
from speccompile.errors import UnsupportedCheckpoint
from speccompile.graph_capture.packed_forward import inputs_unrounded
from speccompile.quantized.models import load_dequantized
from support.errors import raises
from support.families import family
from support.quantized_checkpoints import FORMATS, written
from support.quantized_folders import Tensors, write_folder
from support.quantized_gguf import write_gguf
from support.tiny import tiny_llama

PROMPT = torch.tensor([[5, 9, 23, 9, 5, 9, 23]])


def text(model: PreTrainedModel) -> list[int]:
    output = model.generate(PROMPT, max_new_tokens=24, do_sample=False, pad_token_id=0)
    tokens: list[int] = output[0].tolist()
    return tokens


@pytest.mark.parametrize("name", FORMATS)
def test_the_text_is_that_of_transformers_over_dequantised_weights(name: str, tmp_path: Path) -> None:
    path, reference = written(name, tmp_path)
    model = load_dequantized(path)
    expected = reference.state_dict()
    assert model.state_dict().keys() == expected.keys()
    assert all(torch.equal(tensor, expected[key]) for key, tensor in model.state_dict().items())
    with speccompile.wrap(model, "ngram", tiers=(0, 3), max_len=64, backend="eager") as spec:
        assert spec.generate(PROMPT, max_new_tokens=24)[0].tolist() == text(reference)
        stored = re.escape(quantized.read(path).format)
        assert re.search(f"stored as {stored} and dequantised to float32", spec.explain())


@pytest.mark.parametrize("name", FORMATS)
def test_quantised_weights_of_the_model_take_no_memory(name: str, tmp_path: Path) -> None:
    path, reference = written(name, tmp_path)
    model, weights = pretrained.load_quantized(path)
    expected = reference.state_dict()
    for key, tensor in model.state_dict().items():
        assert tensor.shape == expected[key].shape
        assert tensor.is_meta == (key in weights)
        assert tensor.is_meta or torch.equal(tensor, expected[key])
    assert all(torch.equal(weight.dequantize(), expected[key]) for key, weight in weights.items())
    # Buffers that no checkpoint holds: the rotary table.
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(model.buffers(), reference.buffers(), strict=True))


def qwen3_moe() -> PreTrainedModel:
    return family("qwen3_moe", moe_intermediate_size=64, num_experts=4)


@pytest.mark.parametrize("method", ["gptq", "awq", "compressed-tensors"])
def test_experts_are_joined_and_keep_their_integers(method: str, tmp_path: Path, native: None) -> None:
    reference = write_folder(qwen3_moe(), tmp_path, method)
    model, weights = pretrained.load_quantized(tmp_path)
    state = reference.state_dict()
    experts = [name for name in weights if name.endswith((".gate_up_proj", ".down_proj"))]
    assert len(experts) == 4 and all(torch.equal(weights[name].dequantize(), state[name]) for name in experts)
    assert all(torch.equal(tensor, state[key]) for key, tensor in load_dequantized(tmp_path).state_dict().items())
    options = {"tiers": (0, 3), "max_len": 64, "backend": "eager", "policy": "fixed:3"}
    with speccompile.wrap(model, "ngram", weights=weights, **options) as spec:
        assert "linears over weights of" in spec.explain() and "expert_linear" in spec.explain()
        assert spec.check([PROMPT[0].tolist()], max_new_tokens=12)
        packs = {path: pack for path, pack in spec._build.packs.items() if pack.experts is not None}
        assert packs.keys() == set(experts)
        for path, pack in packs.items():
            assert torch.equal(pack.unpacked_original(torch.float32, state[path].shape), state[path])
        with torch.no_grad(), inputs_unrounded(model, spec._build.packs):
            torch.testing.assert_close(model(PROMPT).logits, reference(PROMPT).logits, rtol=1e-3, atol=1e-3)


def test_experts_by_the_names_of_a_checkpoint_are_those_of_a_model(tmp_path: Path, native: None) -> None:
    model = write_folder(qwen3_moe(), tmp_path, "awq")
    expected = {name: value.clone() for name, value in model.state_dict().items()}
    with speccompile.wrap(model, "ngram", weights=quantized.read(tmp_path), tiers=(0,), backend="eager") as spec:
        assert spec.check([PROMPT[0].tolist()], max_new_tokens=8)
    assert all(torch.equal(value, expected[name]) for name, value in model.state_dict().items())


def test_experts_that_cannot_be_joined_are_refused(tmp_path: Path) -> None:
    def without_one(tensors: Tensors) -> None:
        for name in [name for name in tensors if ".experts.2.up_proj." in name]:
            del tensors[name]

    write_folder(qwen3_moe(), tmp_path / "missing", "awq", change=without_one)
    with raises(UnsupportedCheckpoint, reason=re.compile("a linear of expert 2 is missing, or is not quantised")):
        pretrained.load_quantized(tmp_path / "missing")
    write_folder(qwen3_moe(), tmp_path / "order", "gptq", config={"desc_act": True}, act_order=True)
    _, weights = pretrained.load_quantized(tmp_path / "order")
    with raises(UnsupportedCheckpoint, reason=re.compile("act-order")):
        weights["model.layers.0.mlp.experts.gate_up_proj"]


def test_a_tied_weight_is_without_memory_in_both_places(tmp_path: Path) -> None:
    write_gguf(tiny_llama(hidden=256, tie=True), tmp_path / "tied.gguf", lambda _: Kind.Q8_0)
    model, weights = pretrained.load_quantized(tmp_path / "tied.gguf")
    assert model.lm_head.weight is model.model.embed_tokens.weight and model.lm_head.weight.is_meta
    assert "lm_head.weight" not in weights and "model.embed_tokens.weight" in weights


def test_load_dequantises_a_folder_that_is_read(tmp_path: Path) -> None:
    """transformers alone would want a library that needs a GPU to be installed."""
    reference = write_folder(tiny_llama(), tmp_path, "awq")
    model = pretrained.load_model(str(tmp_path))
    assert torch.equal(model.model.layers[1].mlp.down_proj.weight, reference.model.layers[1].mlp.down_proj.weight)
    assert pretrained.load_model(str(tmp_path), dtype=torch.bfloat16).dtype == torch.bfloat16


def test_the_config_is_that_of_a_plain_model(tmp_path: Path) -> None:
    write_folder(tiny_llama(), tmp_path / "given", "compressed-tensors")
    model = load_dequantized(tmp_path / "given")
    assert not hasattr(model.config, "quantization_config") and not model.training
    assert model.config.name_or_path == str(tmp_path / "given")
    model.save_pretrained(tmp_path / "saved")
    assert isinstance(AutoModelForCausalLM.from_pretrained(tmp_path / "saved"), LlamaForCausalLM)


def test_tensors_that_the_model_has_not_are_refused(tmp_path: Path) -> None:
    def add(tensors: Tensors) -> None:
        tensors["model.layers.0.mlp.extra.weight"] = torch.zeros(2, 2)

    write_folder(tiny_llama(), tmp_path, "gptq", change=add)
    with raises(UnsupportedCheckpoint, reason=re.compile("extra")):
        pretrained.load_quantized(tmp_path)


def test_tensors_that_the_checkpoint_lacks_are_refused(tmp_path: Path) -> None:
    def remove(tensors: Tensors) -> None:
        del tensors["model.norm.weight"]

    write_folder(tiny_llama(), tmp_path, "gptq", change=remove)
    with raises(UnsupportedCheckpoint, reason=re.compile("lacks 1 .*model.norm.weight")):
        pretrained.load_quantized(tmp_path)

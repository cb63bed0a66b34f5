"""Linears of experts are joined as transformers joins those of a checkpoint without integers."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

import speccompile
from speccompile import pretrained
from speccompile.errors import InvalidOption
from speccompile.ops.cpu.forms.grouped import pack_grouped
from speccompile.quantized.experts import joined_experts
from speccompile.quantized.source import TensorSource
from speccompile.quantized.weight import GroupedWeight, QuantizedWeights
from support.errors import raises
from support.families import family
from support.quantized_gguf import write_qwen3_moe

LINEARS = {
    "qwen3_moe": ("mlp.experts", ("gate_proj", "up_proj", "down_proj")),
    "mixtral": ("block_sparse_moe.experts", ("w1", "w3", "w2")),
}


def grouped(outputs: int, inputs: int, seed: int, experts: int | None = None, group: int = 16) -> GroupedWeight:
    generator = torch.Generator().manual_seed(seed)
    values = torch.randint(-8, 8, (outputs, inputs), generator=generator, dtype=torch.int8)
    scales = torch.rand((outputs, inputs // group), generator=generator).half().float()
    return GroupedWeight(values, 4, scales, None, group, experts=experts)


@pytest.mark.parametrize("name", LINEARS)
def test_they_are_joined_as_transformers_joins_them(name: str, tmp_path: Path) -> None:
    model = family(name)
    block, linears = LINEARS[name]
    state = {path: tensor for path, tensor in model.state_dict().items() if ".mlp." not in path}
    weights: dict[str, GroupedWeight] = {}
    for layer, module in enumerate(model.model.layers):
        experts, hidden, inner = module.mlp.experts.down_proj.shape
        state[f"model.layers.{layer}.{block.partition('.')[0]}.gate.weight"] = module.mlp.gate.weight.detach()
        for expert in range(experts):
            for number, linear in enumerate(linears):
                sizes = (hidden, inner) if number == 2 else (inner, hidden)
                path = f"model.layers.{layer}.{block}.{expert}.{linear}.weight"
                weights[path] = grouped(*sizes, seed=len(weights))
                state[path] = weights[path].dequantize()
    save_file(state, tmp_path / "model.safetensors", {"format": "pt"})
    (tmp_path / "config.json").write_text(json.dumps(model.config.to_dict()))
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path).state_dict()
    shapes = {path: parameter.shape for path, parameter in model.named_parameters()}
    ours = joined_experts(QuantizedWeights(weights, "drawn"), shapes, TensorSource("drawn"))
    assert len(ours) == 2 * len(model.model.layers)
    assert all(torch.equal(weight.dequantize(), theirs[path]) for path, weight in ours.items())


def test_experts_of_a_gguf_file_are_those_that_transformers_reads(tmp_path: Path, native: None) -> None:
    """The second linear has another type, as llama.cpp mixes them."""
    kinds = {"ffn_down_exps": Kind.Q6_K, "ffn_gate_exps": Kind.Q4_K, "ffn_up_exps": Kind.Q4_K, "ffn_gate_inp": Kind.F32}
    model = family("qwen3_moe", hidden_size=256, moe_intermediate_size=768, num_experts=4)
    write_qwen3_moe(model, tmp_path / "tiny.gguf", lambda name: kinds.get(name.rpartition(".")[2], Kind.Q8_0))
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="tiny.gguf", dtype=torch.float32)
    loaded, weights = pretrained.load_quantized(tmp_path / "tiny.gguf")
    state = theirs.state_dict()
    assert len([name for name in weights if ".experts." in name]) == 4
    assert all(torch.equal(weight.dequantize(), state[name]) for name, weight in weights.items())
    options = {"tiers": (0, 3), "max_len": 40, "backend": "eager", "policy": "fixed:3"}
    with speccompile.wrap(loaded, "ngram", weights=weights, **options) as spec:
        assert "expert_linear" in spec.explain() and "neither packed" not in spec.explain()
        assert spec.check([[5, 9, 23, 9, 5, 9, 23]], max_new_tokens=8)


@pytest.mark.parametrize(("outputs", "group"), [(64, 32), (7, 16), (33, 32)])
def test_experts_of_any_size_are_packed_one_after_another(outputs: int, group: int) -> None:
    weight = grouped(3 * outputs, 64, seed=1, experts=3, group=group)
    assert weight.shape == (3, outputs, 64)
    form, tensors = pack_grouped(weight)
    for expert, parts in enumerate(zip(*(tensor.chunk(3) for tensor in tensors), strict=True)):
        assert torch.equal(form.unpack(parts, outputs, 64), weight.dequantize()[expert])


def test_a_number_of_experts_that_does_not_divide_the_outputs_is_refused() -> None:
    with raises(InvalidOption, name="experts", reason=re.compile("must divide the number of outputs, 7")):
        grouped(7, 64, seed=1, experts=2)

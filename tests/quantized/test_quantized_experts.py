"""Linears of experts are joined as transformers joins those of a checkpoint without integers."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from speccompile.errors import InvalidOption
from speccompile.ops.cpu.forms.grouped import pack_grouped
from speccompile.quantized.experts import joined_experts
from speccompile.quantized.source import TensorSource
from speccompile.quantized.weight import GroupedWeight, QuantizedWeights
from support.errors import raises
from support.families import family

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

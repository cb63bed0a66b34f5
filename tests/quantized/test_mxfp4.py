"""Experts of gpt-oss in MXFP4: as transformers dequantises them, and in four bits in a wrap."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

import speccompile
from speccompile import pretrained, quantized
from speccompile.errors import DamagedCheckpoint
from support.errors import raises
from support.families import model_of

PROMPTS = [[5, 9, 23, 9, 5, 9, 23], [7, 8, 9]]
OPTIONS: dict[str, Any] = {"tiers": (0, 3), "max_batch": 2, "max_len": 64, "backend": "eager", "policy": "fixed:3"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny gpt-oss in OpenAI's layout. All codes of four bits occur."""
    found = tmp_path_factory.mktemp("mxfp4")
    model = model_of("gpt_oss", intermediate_size=128)
    generator = torch.Generator().manual_seed(0)
    tensors = {}
    for name, value in model.state_dict().items():
        if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            experts, inputs, outputs = value.shape
            size = (experts, outputs, inputs // 32)
            tensors[f"{name}_blocks"] = torch.randint(256, (*size, 16), generator=generator).to(torch.uint8)
            tensors[f"{name}_scales"] = torch.randint(118, 126, size, generator=generator).to(torch.uint8)
        else:
            tensors[name] = value.to(torch.bfloat16).contiguous()
    save_file(tensors, found / "model.safetensors", {"format": "pt"})
    exempt = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    quantization = {"quant_method": "mxfp4", "modules_to_not_convert": exempt}
    config = {**model.config.to_dict(), "dtype": "bfloat16", "quantization_config": quantization}
    (found / "config.json").write_text(json.dumps(config))
    return found


def test_each_weight_is_what_transformers_computes(folder: Path) -> None:
    stored, weights = load_file(folder / "model.safetensors"), quantized.read(folder)
    assert weights.format == "MXFP4" and len(weights) == 4
    for name, weight in weights.items():
        theirs = convert_moe_packed_tensors(stored[f"{name}_blocks"], stored[f"{name}_scales"], dtype=torch.float32)
        assert torch.equal(weight.dequantize().mT, theirs)


@pytest.mark.parametrize("dtype", ["auto", torch.float32], ids=str)
def test_the_loaded_model_is_that_of_transformers(folder: Path, dtype: torch.dtype | str) -> None:
    ours, theirs = pretrained.load_model(str(folder), dtype=dtype), AutoModelForCausalLM.from_pretrained(folder)
    assert ours.dtype == (torch.bfloat16 if dtype == "auto" else dtype)
    expected = theirs.state_dict()
    assert ours.state_dict().keys() == expected.keys()
    assert all(torch.equal(value.bfloat16(), expected[name]) for name, value in ours.state_dict().items())


@pytest.mark.usefixtures("native")
def test_steps_multiply_with_four_bits(folder: Path, tmp_path: Path) -> None:
    model, weights = pretrained.load_quantized(folder)
    with speccompile.wrap(model, "ngram", weights=weights, **OPTIONS) as spec:
        assert "4 linears over weights of MXFP4 in fp4 by speccompile.fp4_expert_linear" in spec.explain()
        experts = [pack for pack in spec._build.packs if pack.experts is not None]
        # Half a byte for a number, and two for a scale of 32.
        assert sum(pack.nbytes for pack in experts) == sum(pack.weight.numel() for pack in experts) * (1 / 2 + 2 / 32)
        assert spec.check(PROMPTS, max_new_tokens=8)
        texts = [spec.generate(torch.tensor([prompt]), max_new_tokens=8).tolist() for prompt in PROMPTS]
        spec.save_weights(tmp_path / "packed")
    mapped = pretrained.load_model(str(tmp_path / "packed"))
    with speccompile.wrap(mapped, "ngram", **OPTIONS) as spec:
        assert "in fp4 by speccompile.fp4_expert_linear" in spec.explain()
        assert texts == [spec.generate(torch.tensor([prompt]), max_new_tokens=8).tolist() for prompt in PROMPTS]


@pytest.mark.parametrize(
    ("name", "change", "reason"),
    [
        ("_blocks", lambda blocks: blocks[..., :8].contiguous(), "its shapes do not fit one another: blocks"),
        ("_scales", lambda scales: scales[:, :1].contiguous(), "its shapes do not fit one another: blocks"),
        ("_scales", lambda scales: scales.fill_(255), "a scale is not a number"),
        ("_scales", None, "it has no tensor"),
    ],
    ids=["half a block", "fewer scales", "no number", "no scales"],
)
def test_a_damaged_weight_is_refused(name: str, change: Any, reason: str, folder: Path, tmp_path: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    path = "model.layers.0.mlp.experts.down_proj"
    value = tensors.pop(f"{path}{name}")
    if change is not None:
        tensors[f"{path}{name}"] = change(value)
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    weights = quantized.read(tmp_path)
    with raises(DamagedCheckpoint, source=str(tmp_path), reason=re.compile(re.escape(reason))):
        weights[path]

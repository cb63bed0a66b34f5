"""NVFP4 of ModelOpt, against its definition."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.integrations.mxfp4 import FP4_VALUES

import speccompile
from speccompile import pretrained, quantized
from speccompile.errors import DamagedCheckpoint, UnsupportedCheckpoint
from support.errors import raises
from support.tiny import tiny_llama

FIRST = "model.layers.0.mlp.down_proj"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama whose linears of layers are quantised. All codes of four bits occur."""
    found = tmp_path_factory.mktemp("nvfp4")
    model = tiny_llama()
    model.save_pretrained(found)
    generator = torch.Generator().manual_seed(0)
    tensors = {name: value.clone() for name, value in model.state_dict().items()}
    for name in [name for name in tensors if "_proj.weight" in name]:
        outputs, inputs = tensors[name].shape
        tensors[name] = torch.randint(256, (outputs, inputs // 2), generator=generator).to(torch.uint8)
        scales = torch.rand((outputs, inputs // 16), generator=generator) * 400 + 20
        tensors[f"{name}_scale"] = scales.to(torch.float8_e4m3fn)
        tensors[f"{name}_scale_2"] = torch.tensor(1 / 3000)
        tensors[name.replace("weight", "input_scale")] = torch.tensor(0.01)
    save_file(tensors, found / "model.safetensors", {"format": "pt"})
    (found / "hf_quant_config.json").write_text(json.dumps({"quantization": {"quant_algo": "NVFP4", "group_size": 16}}))
    return found


def test_each_weight_is_its_definition(folder: Path) -> None:
    stored, weights = load_file(folder / "model.safetensors"), quantized.read(folder)
    assert weights.format == "NVFP4" and len(weights) == 14
    for name, weight in weights.items():
        codes = torch.stack((stored[name] & 15, stored[name] >> 4), -1).flatten(1).long()
        scales = stored[f"{name}_scale"].float() * stored[f"{name}_scale_2"]
        assert torch.equal(weight.dequantize(), torch.tensor(FP4_VALUES)[codes] * scales.repeat_interleave(16, 1))


@pytest.mark.usefixtures("native")
def test_steps_multiply_with_what_is_stored(folder: Path) -> None:
    dequantised = pretrained.load_model(str(folder))
    model, weights = pretrained.load_quantized(folder)
    for name, weight in weights.items():
        assert torch.equal(dequantised.get_parameter(name), weight.dequantize())
    with speccompile.wrap(
        model, "ngram", weights=weights, tiers=(0, 3), max_len=64, backend="eager", policy="fixed:3"
    ) as spec:
        assert "14 of NVFP4 as stored" in spec.explain()
        assert spec.check([[5, 9, 23, 9, 5, 9, 23]], max_new_tokens=8)


@pytest.mark.parametrize(
    ("tensor", "change", "error", "reason"),
    [
        ("weight_scale_2", lambda scale: scale * torch.inf, DamagedCheckpoint, "a scale is not a finite number"),
        ("weight_scale", lambda scales: scales[:-1], DamagedCheckpoint, "its shapes do not fit one another"),
        ("weight", lambda packed: packed[:, :0], DamagedCheckpoint, "its shapes do not fit one another"),
        ("weight", lambda packed: packed[0, 0], DamagedCheckpoint, "its shapes do not fit one another"),
        ("weight_scale", lambda scales: scales.float(), UnsupportedCheckpoint, "only torch.float8_e4m3fn are read"),
    ],
    ids=["infinite", "an output less", "no inputs", "a number", "other dtype"],
)
def test_what_does_not_fit_is_refused(
    tensor: str, change: Any, error: type[Exception], reason: str, folder: Path, tmp_path: Path
) -> None:
    tensors = load_file(folder / "model.safetensors")
    name = f"{FIRST}.{tensor}"
    save_file({**tensors, name: change(tensors[name]).contiguous()}, tmp_path / "model.safetensors", {"format": "pt"})
    for file in ("config.json", "hf_quant_config.json"):
        (tmp_path / file).write_text((folder / file).read_text())
    with raises(error, source=str(tmp_path), reason=re.compile(reason)):
        quantized.read(tmp_path)[f"{FIRST}.weight"]

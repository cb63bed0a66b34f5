"""Folders whose tensors, configs or metadata are not what a format stores: one clear error each."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from speccompile import pretrained, quantized
from speccompile.errors import DamagedCheckpoint, UnsupportedCheckpoint
from support.errors import raises
from support.quantized_folders import Tensors, write_folder
from support.tiny import tiny_llama

FIRST = "model.layers.0.self_attn.q_proj"


@pytest.mark.parametrize(
    ("method", "tensor", "dtype"),
    [
        *(("gptq", name, torch.int64) for name in ("qweight", "qzeros", "scales")),
        ("gptq", "g_idx", torch.float32),
        *(("awq", name, torch.int64) for name in ("qweight", "qzeros", "scales")),
        ("compressed-tensors", "weight_scale", torch.int8),
        ("compressed-tensors", "weight_shape", torch.float32),
        ("compressed-tensors", "weight_zero_point", torch.float32),
        ("torchao", "_weight_scale", torch.float64),
        ("torchao", "_weight_zero_point", torch.bool),
    ],
)
def test_a_tensor_of_another_dtype_is_refused(method: str, tensor: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """Read as what it is not, it would be other numbers."""

    def change(tensors: Tensors) -> None:
        tensors[f"{FIRST}.{tensor}"] = tensors[f"{FIRST}.{tensor}"].to(dtype)

    write_folder(tiny_llama(), tmp_path, method, change=change)
    with raises(UnsupportedCheckpoint, reason=re.compile(f"{FIRST}.{tensor}: it is {dtype}, and .* are read")):
        quantized.read(tmp_path)[f"{FIRST}.weight"]


@pytest.mark.parametrize(
    ("method", "tensor", "shape"),
    [
        ("gptq", "g_idx", (0,)),
        ("gptq", "g_idx", ()),
        ("awq", "qweight", (0, 8)),
        ("torchao", "_weight_scale", (2, 64)),
        ("torchao", "_weight_scale", (128,)),
        ("torchao", "_weight_zero_point", (2, 64)),
    ],
)
def test_a_tensor_of_another_form_is_damaged(method: str, tensor: str, shape: tuple[int, ...], tmp_path: Path) -> None:
    def change(tensors: Tensors) -> None:
        old = tensors[f"{FIRST}.{tensor}"].flatten()
        tensors[f"{FIRST}.{tensor}"] = old[: math.prod(shape)].reshape(shape)

    write_folder(tiny_llama(), tmp_path, method, change=change)
    with pytest.raises(DamagedCheckpoint):
        quantized.read(tmp_path)[f"{FIRST}.weight"]


@pytest.mark.parametrize("weight_map", [{"a": 3}, [], {"a": "absent.safetensors"}])
def test_an_index_that_cannot_be_read_is_damaged(weight_map: Any, tmp_path: Path) -> None:
    write_folder(tiny_llama(), tmp_path, "awq")
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    with raises(DamagedCheckpoint):
        quantized.read(tmp_path)


@pytest.mark.parametrize("group", [{"weights": 3}, {"input_activations": [1]}, {"weights": {"num_bits": []}}])
def test_groups_of_a_config_that_cannot_be_read_are_damaged(group: Any, tmp_path: Path) -> None:
    write_folder(tiny_llama(), tmp_path, "compressed-tensors", {"config_groups": {"group_0": group}})
    with raises(DamagedCheckpoint):
        quantized.read(tmp_path)[f"{FIRST}.weight"]


@pytest.mark.parametrize("fields", [{"_tensor_data_names": 3}, {"_data": 3}])
def test_metadata_of_torchao_that_cannot_be_read_is_damaged(fields: dict[str, Any], tmp_path: Path) -> None:
    write_folder(tiny_llama(), tmp_path, "torchao")
    file = tmp_path / "model.safetensors"
    with safe_open(file, "pt") as opened:
        metadata = opened.metadata()
    fact = json.loads(metadata[f"{FIRST}.weight"])
    save_file(load_file(file), file, metadata | {f"{FIRST}.weight": json.dumps(fact | fields)})
    with raises(DamagedCheckpoint):
        quantized.read(tmp_path)


@pytest.mark.parametrize(
    "fields",
    [{"hidden_size": 3}, {"num_attention_heads": 0}, {"model_type": []}, {"head_dim": -1}, {"hidden_act": "unknown"}],
    ids=lambda fields: next(iter(fields)),
)
def test_a_config_that_transformers_does_not_read_is_refused(fields: dict[str, Any], tmp_path: Path) -> None:
    write_folder(tiny_llama(), tmp_path, "gptq")
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | fields))
    with raises(UnsupportedCheckpoint, reason=re.compile("^transformers ")):
        pretrained.load_quantized(tmp_path)

"""Folders with tiny models whose linears are float8, in the published layouts."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, PreTrainedModel

Tensors = dict[str, torch.Tensor]
#: Its rows and columns do not divide the weights.
BLOCK = (48, 40)
_MOST = torch.finfo(torch.float8_e4m3fn).max


def of_tensor(weight: torch.Tensor) -> torch.Tensor:
    return weight.abs().max() / _MOST


def of_outputs(weight: torch.Tensor) -> torch.Tensor:
    return weight.abs().amax(1, keepdim=True) / _MOST


def of_blocks(weight: torch.Tensor) -> torch.Tensor:
    return torch.stack(
        [torch.stack([of_tensor(part) for part in row.split(BLOCK[1], 1)]) for row in weight.split(BLOCK[0])]
    )


def spread(scales: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    """``scales`` as numbers for each value, without the package's own code."""
    if scales.dim() == 2 and scales.shape[1] > 1:
        rows, columns = (torch.arange(size) // block for size, block in zip(shape, BLOCK, strict=True))
        return scales[rows][:, columns]
    return scales.reshape(-1, 1).expand(shape)


@dataclass(frozen=True)
class Float8Layout:
    """A format.

    Args:
        config: ``quantization_config``; None writes ``modelopt`` into ModelOpt's own file.
        scales: those of a weight.
        suffix: what stands after the name of a weight for its scales.
        modelopt: contents of ModelOpt's own file.
        beside: scales of inputs, outputs and KV, by the module that they belong to and their name.
    """

    config: dict[str, Any] | None
    scales: Callable[[torch.Tensor], torch.Tensor] = of_tensor
    suffix: str = "_scale"
    modelopt: dict[str, Any] | None = None
    beside: dict[str, str] = field(default_factory=dict)


def _compressed(strategy: str, **weights: Any) -> dict[str, Any]:
    group = {
        "targets": ["Linear"],
        "input_activations": {"dynamic": False, "num_bits": 8, "type": "float"},
        "weights": {"num_bits": 8, "type": "float", "strategy": strategy, "symmetric": True, **weights},
    }
    config = {"quant_method": "compressed-tensors", "format": "float-quantized", "ignore": ["lm_head"]}
    return {**config, "config_groups": {"group_0": group}, "kv_cache_scheme": {"num_bits": 8, "type": "float"}}


_KV = {"k_proj": "k_scale", "v_proj": "v_scale"}
LAYOUTS = {
    "modelopt": Float8Layout({"quant_method": "modelopt", "quant_algo": "FP8"}, beside={"_proj": "input_scale", **_KV}),
    "modelopt in its own file": Float8Layout(
        None, modelopt={"quant_algo": "FP8", "kv_cache_quant_algo": "FP8"}, beside=_KV
    ),
    "modelopt per output": Float8Layout(
        {"quant_method": "modelopt", "quant_algo": "FP8_PER_CHANNEL_PER_TOKEN"}, lambda weight: of_outputs(weight)[:, 0]
    ),
    "AutoFP8": Float8Layout(
        {"quant_method": "fp8", "activation_scheme": "static"},
        beside={"_proj": "input_scale", "k_proj": "output_scale"},
    ),
    "Mistral": Float8Layout(
        {"quant_method": "fp8", "weight_block_size": None}, suffix="_scale_inv", beside={"_proj": "activation_scale"}
    ),
    "blocks": Float8Layout({"quant_method": "fp8", "weight_block_size": [*BLOCK]}, of_blocks, "_scale_inv"),
    "FBGEMM": Float8Layout({"quant_method": "fbgemm_fp8"}, of_outputs, beside={"_proj": "input_scale_ub"}),
    "compressed-tensors per output": Float8Layout(_compressed("channel"), lambda weight: of_outputs(weight).bfloat16()),
    "compressed-tensors per tensor": Float8Layout(
        _compressed("tensor"), lambda weight: of_tensor(weight).reshape(1), beside={"_proj": "input_scale"}
    ),
    "compressed-tensors blocks": Float8Layout(_compressed("block", block_structure=[*BLOCK]), of_blocks),
}


def write_float8(
    model: PreTrainedModel, folder: Path, name: str, change: Callable[[Tensors], None] | None = None, **config: Any
) -> PreTrainedModel:
    """Write ``model`` with float8 linears into ``folder``, and return what transformers makes of their products with
    the scales, in float32.

    Args:
        change: called with the tensors before they are written.
        config: fields of the model's ``config.json``.
    """
    layout, dense = LAYOUTS[name], folder / "dense"
    model.save_pretrained(dense)
    tensors: Tensors = {}
    products: Tensors = {}
    for key, tensor in load_file(dense / "model.safetensors").items():
        products[key] = tensors[key] = tensor
        if not key.endswith("_proj.weight"):
            continue
        scales = layout.scales(tensor)
        each = spread(scales.float(), tensor.shape)
        tensors[key] = (tensor / each).clamp(-_MOST, _MOST).to(torch.float8_e4m3fn)
        products[key], tensors[key + layout.suffix] = tensors[key].float() * each, scales
        for ending, beside in layout.beside.items():
            if key.endswith(f"{ending}.weight"):
                tensors[f"{key.removesuffix('weight')}{beside}"] = torch.tensor(0.05)
    if change is not None:
        change(tensors)
    save_file(products, dense / "model.safetensors", {"format": "pt"})
    save_file(
        {key: tensor.contiguous() for key, tensor in tensors.items()}, folder / "model.safetensors", {"format": "pt"}
    )
    fields = json.loads((dense / "config.json").read_text()) | config
    if layout.config is not None:
        fields["quantization_config"] = layout.config
    if layout.modelopt is not None:
        contents = {"producer": {"name": "modelopt"}, "quantization": layout.modelopt}
        (folder / "hf_quant_config.json").write_text(json.dumps(contents))
    (folder / "config.json").write_text(json.dumps(fields))
    (folder / "generation_config.json").write_text((dense / "generation_config.json").read_text())
    reference: PreTrainedModel = AutoModelForCausalLM.from_pretrained(dense, dtype=torch.float32)
    return reference

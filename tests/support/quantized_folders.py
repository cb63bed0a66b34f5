"""Folders with tiny quantised Llamas, in the published layouts. That these are the libraries' is what the files of
``tests/quantized/golden`` are for, which those libraries wrote."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

GROUP = 32
Tensors = dict[str, torch.Tensor]


@dataclass
class Drawn:
    """Integers int64 ``[N, K]``, zero points ``[N, G]``, scales float16 ``[N, G]``, and the group of each input."""

    values: torch.Tensor
    zeros: torch.Tensor
    scales: torch.Tensor
    of_input: torch.Tensor
    bits: int = 4

    @property
    def weight(self) -> torch.Tensor:
        """float32 ``[N, K]``, as all of these formats compute it."""
        integers = self.values - self.zeros[:, self.of_input]
        return integers.float() * self.scales[:, self.of_input].float()


def draw(weight: torch.Tensor, seed: int, bits: int = 4, group: int = GROUP, act_order: bool = False) -> Drawn:
    """Random integers for a weight of this shape and size."""
    generator = torch.Generator().manual_seed(seed)
    outputs, inputs = weight.shape
    most = (1 << bits) - 1
    of_input = torch.arange(inputs) // group
    if act_order:
        of_input = of_input[torch.randperm(inputs, generator=generator)]
    shape = (outputs, inputs // group)
    scales = (torch.rand(shape, generator=generator) + 0.5) * float(weight.detach().std()) * 3 / most
    return Drawn(
        values=torch.randint(0, most + 1, (outputs, inputs), generator=generator),
        zeros=torch.randint(most // 2 - 1, most // 2 + 3, shape, generator=generator),
        scales=scales.half(),
        of_input=of_input,
        bits=bits,
    )


def words(fields: torch.Tensor, bits: int) -> torch.Tensor:
    """int64 ``[R, C]`` without signs as int32 words ``[R, C * bits / 32]``, from the lowest bit on; 2, 4 or 8 bits."""
    parts = fields.unflatten(1, (-1, 32 // bits)) << (torch.arange(32 // bits) * bits)
    return parts.sum(-1).to(torch.uint32).view(torch.int32)


def gptq(drawn: Drawn, less: int = 1) -> Tensors:
    return {
        "qweight": words(drawn.values, drawn.bits).t(),
        "qzeros": words(drawn.zeros.t() - less, drawn.bits),
        "scales": drawn.scales.t(),
        "g_idx": drawn.of_input.to(torch.int32),
    }


def awq(drawn: Drawn) -> Tensors:
    order = torch.tensor([0, 2, 4, 6, 1, 3, 5, 7])

    def interleaved(fields: torch.Tensor) -> torch.Tensor:
        return words(fields.t().unflatten(1, (-1, 8))[..., order].flatten(1), 4)

    return {"qweight": interleaved(drawn.values), "qzeros": interleaved(drawn.zeros), "scales": drawn.scales.t()}


def pack_quantized(drawn: Drawn) -> Tensors:
    return {
        "weight_packed": words(drawn.values, drawn.bits),
        "weight_scale": drawn.scales,
        "weight_zero_point": words(drawn.zeros.t(), drawn.bits).t(),
        "weight_shape": torch.tensor(drawn.values.shape),
    }


def torchao(drawn: Drawn) -> Tensors:
    middle = 1 << (drawn.bits - 1)
    return {
        "_weight_qdata": (drawn.values - middle).to(torch.int8),
        "_weight_scale": drawn.scales,
        "_weight_zero_point": (drawn.zeros - middle).to(torch.int8),
    }


@dataclass(frozen=True)
class Layout:
    """A format: the tensors of a module, and ``quantization_config``."""

    tensors: Callable[[Drawn], Tensors]
    config: dict[str, Any]


_COMPRESSED_GROUP = {
    "targets": ["Linear"],
    "weights": {"num_bits": 4, "type": "int", "strategy": "group", "group_size": GROUP, "symmetric": False},
}
LAYOUTS = {
    "gptq": Layout(gptq, {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False, "sym": False}),
    "awq": Layout(awq, {"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm"}),
    "compressed-tensors": Layout(
        pack_quantized,
        {
            "quant_method": "compressed-tensors",
            "format": "pack-quantized",
            "config_groups": {"group_0": _COMPRESSED_GROUP},
            "ignore": ["lm_head"],
        },
    ),
    "torchao": Layout(torchao, {"quant_method": "torchao", "quant_type": {"default": {}}}),
}
#: What torchao writes of each weight into the metadata of its file.
_TORCHAO = {
    "_type": "IntxUnpackedToInt8Tensor",
    "_data": {"target_dtype": {"_type": "torch.dtype", "_data": "int4"}, "block_size": [1, GROUP]},
    "_tensor_data_names": ["qdata", "scale", "zero_point"],
}


def _draw_experts(module: Any, path: str, **drawn: Any) -> Iterator[tuple[str, Drawn]]:
    """Integers for each linear of each expert, by its path in a checkpoint. The parameters become their weights."""
    for expert, (inner, down) in enumerate(zip(module.gate_up_proj.data, module.down_proj.data, strict=True)):
        linears = {"gate_proj": inner[: len(inner) // 2], "up_proj": inner[len(inner) // 2 :], "down_proj": down}
        for number, (name, weight) in enumerate(linears.items()):
            integers = draw(weight, 1000 + 3 * expert + number, **drawn)
            weight.copy_(integers.weight)
            yield f"{path}.{expert}.{name}", integers


def write_folder(
    model: Any,
    folder: Path,
    method: str,
    config: dict[str, Any] | None = None,
    change: Callable[[Tensors], None] | None = None,
    **drawn: Any,
) -> Any:
    """Write ``model`` with drawn integers in the place of the linears of its layers and experts, which become those of
    the dequantised weights.

    Args:
        config: fields of ``quantization_config`` that differ from the layout's.
        change: called with all tensors before they are written.
        drawn: arguments of :func:`draw`.
    """
    layout = LAYOUTS[method]
    tensors: Tensors = {}
    kinds: dict[str, Any] = {}
    for index, (path, module) in enumerate(model.model.layers.named_modules()):
        if isinstance(module, torch.nn.Linear):
            integers = draw(module.weight, index, **drawn)
            module.weight.data = integers.weight
            prefix = f"model.layers.{path}"
            tensors |= {f"{prefix}.{name}": tensor for name, tensor in layout.tensors(integers).items()}
            kinds[f"{prefix}.weight"] = _TORCHAO
    for path, module in model.model.layers.named_modules():
        if path.endswith(".experts"):
            drawn_experts = dict(_draw_experts(module, f"model.layers.{path}", **drawn))
            kinds |= {f"model.layers.{path}.{name}": _TORCHAO for name in ("gate_up_proj", "down_proj")}
            for prefix, integers in drawn_experts.items():
                tensors |= {f"{prefix}.{name}": tensor for name, tensor in layout.tensors(integers).items()}
    for name, tensor in model.state_dict().items():
        if f"{name}" not in kinds and not (name == "lm_head.weight" and model.config.tie_word_embeddings):
            tensors[name] = tensor
            kinds[name] = {"_type": "Tensor"}
    if change is not None:
        change(tensors)
    metadata = {"format": "pt"}
    if method == "torchao":
        metadata |= {name: json.dumps(kind) for name, kind in kinds.items()} | {"tensor_names": json.dumps([*kinds])}
    folder.mkdir(parents=True, exist_ok=True)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors", metadata)
    fields = {**model.config.to_dict(), "quantization_config": {**layout.config, **(config or {})}}
    (folder / "config.json").write_text(json.dumps(fields))
    model.generation_config.save_pretrained(folder)
    return model

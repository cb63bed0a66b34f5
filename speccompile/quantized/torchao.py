"""torchao checkpoints in safetensors: ``Int8Tensor`` and ``IntxUnpackedToInt8Tensor``. torchao is not needed.

Source: torchao, ``prototype/safetensors/safetensors_support.py`` and ``quantization/quant_primitives.py``.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch

from speccompile.quantized.affine import affine_weight
from speccompile.quantized.files import INTEGERS, SCALES, TensorFiles
from speccompile.quantized.source import TensorSource
from speccompile.quantized.weight import GroupedWeight

#: Kinds of tensors that are read, and a description of the others.
KINDS = ("Int8Tensor", "IntxUnpackedToInt8Tensor")
OTHERS = {
    "Float8Tensor": "floating point of 8 bits, whose values are not multiples of a scale",
    "Int4Tensor": "the order of a CUDA kernel, with zero points of floating point",
    "Int4TilePackedTo4dTensor": "the order of a CUDA kernel's tiles",
    "Int4PlainInt32Tensor": "the order of a kernel for XPU and NPU",
}


def readers(
    files: TensorFiles, config: Mapping[str, Any], source: TensorSource
) -> tuple[dict[str, Callable[[], GroupedWeight]], set[str], str]:
    """Return the result of :func:`speccompile.quantized.gptq.readers` for a torchao checkpoint."""
    try:
        facts = {name: json.loads(files.metadata[name]) for name in json.loads(files.metadata["tensor_names"])}
        kinds = {name: str(fact["_type"]) for name, fact in facts.items()}
    except (KeyError, TypeError, ValueError) as error:
        raise source.damaged(f"the metadata of its files is not torchao's ({error!r})") from error
    weights: dict[str, Callable[[], GroupedWeight]] = {}
    used = set()
    for name, kind in kinds.items():
        if kind == "Tensor":
            continue
        if kind not in KINDS:
            reason = f"it is a torchao {kind}: {OTHERS.get(kind, 'not integers with scales')}"
            raise source.of(name).unsupported(f"{reason}; only {' and '.join(KINDS)} are read")
        module, _, parameter = name.rpartition(".")
        names, data = facts[name].get("_tensor_data_names") or [], facts[name].get("_data") or {}
        if not isinstance(names, list) or not isinstance(data, Mapping):
            raise source.of(name).damaged("its metadata is not torchao's")
        parts = {part: f"{module}._{parameter}_{part}" for part in names}
        weights[name] = partial(_read, files, parts, data, source.of(name))
        used |= set(parts.values())
    return weights, used, "torchao"


def _read(
    files: TensorFiles, parts: Mapping[str, str], facts: Mapping[str, Any], source: TensorSource
) -> GroupedWeight:
    if unread := sorted(set(parts) - {"qdata", "scale", "zero_point"}):
        raise source.unsupported(f"its inputs are scaled by stored tensors ({', '.join(unread)})")
    if not {"qdata", "scale"} <= set(parts):
        raise source.damaged("it has no qdata or no scale")
    values, scales = files.get(parts["qdata"]), files.get(parts["scale"], SCALES)
    zeros = files.get(parts["zero_point"], (*INTEGERS, *SCALES)) if "zero_point" in parts else None
    block = facts.get("block_size")
    if values.dim() != 2 or values.dtype != torch.int8 or not isinstance(block, list) or len(block) != 2:
        raise source.unsupported(f"its values are {values.dtype} {list(values.shape)} in blocks of {block}")
    outputs, inputs = values.shape
    rows, columns = (int(size) for size in block)
    if rows not in (1, outputs) or columns < 1 or inputs % columns or scales.numel() * rows * columns != values.numel():
        reason = f"scales of {list(scales.shape)} for blocks of {block} in a weight of {list(values.shape)}"
        raise source.unsupported(f"{reason}: there must be one scale for each output, or one for all outputs")

    sizes = outputs // rows, inputs // columns
    if not (tuple(scales.shape) == sizes if scales.dim() > 1 else sizes[1] == 1):
        raise source.damaged(f"its scales are {list(scales.shape)}, and must be {list(sizes)}")

    def by_output(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.reshape(-1, inputs // columns).expand(outputs, -1)

    if zeros is not None:
        if zeros.shape != scales.shape:
            raise source.damaged(f"zero points of {list(zeros.shape)} for scales of {list(scales.shape)}")
        if not torch.equal(zeros, zeros.round()):
            raise source.unsupported("its zero points are not integers")
        zeros = by_output(zeros.to(torch.int16))
    return affine_weight(source, values, zeros, by_output(scales), _bits(facts))


def _bits(facts: Mapping[str, Any]) -> int:
    """Bits of ``{"_type": "torch.dtype", "_data": "int4"}``; 8 if no dtype is named."""
    target = facts.get("target_dtype") or {}
    name = str(target.get("_data", "int8")) if isinstance(target, Mapping) else "int8"
    digits = name.removeprefix("int")
    return int(digits) if digits.isdecimal() else 8

"""NVFP4 checkpoints of NVIDIA ModelOpt: floating point of four bits, with an FP8 scale for 16 inputs.

Source: the layout of vLLM's ``quantization/modelopt.py``, and the converter ``modelopt_nvfp4`` of compressed-tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch

from speccompile.quantized.files import SCALES, TensorFiles
from speccompile.quantized.float8 import ROUNDING
from speccompile.quantized.fp4 import BYTES, NVFP4, fp4_weight
from speccompile.quantized.source import TensorSource
from speccompile.quantized.weight import GroupedWeight

#: ``quant_algo`` of checkpoints that are read.
ALGORITHMS = ("NVFP4",)
#: The weight, its scales, and what all scales are multiplied with.
TENSORS = ("weight", "weight_scale", "weight_scale_2")


def readers(
    files: TensorFiles, config: Mapping[str, Any], source: TensorSource
) -> tuple[dict[str, Callable[[], GroupedWeight]], set[str], str]:
    """Return the result of :func:`speccompile.quantized.gptq.readers` for a ModelOpt checkpoint. Scales of inputs,
    outputs and KV are not used, since a step does not round by them."""
    modules = [name.removesuffix(f".{TENSORS[2]}") for name in files if name.endswith(f".{TENSORS[2]}")]
    used = {f"{module}.{tensor}" for module in modules for tensor in TENSORS}
    used |= {name for name in files if name.rpartition(".")[2] in ROUNDING}
    return {f"{module}.weight": partial(_read, files, module, source.of(module)) for module in modules}, used, NVFP4


def _read(files: TensorFiles, module: str, source: TensorSource) -> GroupedWeight:
    packed, stored, whole = (
        files.get(f"{module}.{tensor}", dtypes)
        for tensor, dtypes in zip(TENSORS, (BYTES, (torch.float8_e4m3fn,), SCALES), strict=True)
    )
    return fp4_weight(packed, stored.float() * whole.float(), source)

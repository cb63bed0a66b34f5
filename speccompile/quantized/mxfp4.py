"""MXFP4 checkpoints in safetensors, as OpenAI publishes gpt-oss: experts in floating point of four bits.

Source: OCP Microscaling Formats 1.0, section 5.3; the layout of transformers' ``integrations/mxfp4.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch

from speccompile.quantized.files import TensorFiles
from speccompile.quantized.source import TensorSource
from speccompile.quantized.weight import GroupedWeight
from speccompile.utils.fp4 import decode

FORMAT = "MXFP4"
#: Inputs that share a scale, two in a byte.
BLOCK = 32
#: Bits of the range of the doubled numbers, -12 to 12.
BITS = 6
#: The exponent of a scale that is not a number, and what is added to all others.
NAN, BIAS = 255, 127
BYTES = (torch.uint8,)


def readers(
    files: TensorFiles, config: Mapping[str, Any], source: TensorSource
) -> tuple[dict[str, Callable[[], GroupedWeight]], set[str], str]:
    """Return the result of :func:`speccompile.quantized.gptq.readers` for an MXFP4 checkpoint."""
    names = [name.removesuffix("_blocks") for name in files if name.endswith("_blocks")]
    used = {f"{name}{tensor}" for name in names for tensor in ("_blocks", "_scales")}
    return {name: partial(_read, files, name, source.of(name)) for name in names}, used, FORMAT


def _read(files: TensorFiles, name: str, source: TensorSource) -> GroupedWeight:
    blocks, exponents = (files.get(f"{name}{tensor}", BYTES) for tensor in ("_blocks", "_scales"))
    if blocks.dim() != 4 or blocks.shape[-1] * 2 != BLOCK or exponents.shape != blocks.shape[:-1] or not len(blocks):
        shapes = f"blocks {list(blocks.shape)}, scales {list(exponents.shape)}"
        raise source.damaged(f"its shapes do not fit one another: {shapes}")
    if bool((exponents == NAN).any()):
        raise source.damaged("a scale is not a number")
    experts = blocks.shape[0]
    # The first of two inputs is in the low half of a byte.
    values = decode(torch.stack((blocks & 15, blocks >> 4), -1).view(torch.int8)).flatten(2).flatten(0, 1)
    # Numbers are doubled.
    halves = torch.full((exponents.shape[0] * exponents.shape[1], exponents.shape[2]), 0.5)
    scales = torch.ldexp(halves, exponents.flatten(0, 1).to(torch.int32) - BIAS)
    return GroupedWeight(values, BITS, scales, None, BLOCK, experts=experts)

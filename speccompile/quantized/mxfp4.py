"""MXFP4 checkpoints in safetensors, as OpenAI publishes gpt-oss: experts in floating point of four bits.

Source: OCP Microscaling Formats 1.0, section 5.3; the layout of transformers' ``integrations/mxfp4.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from speccompile.quantized.files import TensorFiles
from speccompile.quantized.fp4 import BYTES, MXFP4, fp4_weight, powers_of_two
from speccompile.quantized.source import TensorSource
from speccompile.quantized.weight import GroupedWeight

#: Bytes of 32 inputs, which share a scale.
BLOCK = 16


def readers(
    files: TensorFiles, config: Mapping[str, Any], source: TensorSource
) -> tuple[dict[str, Callable[[], GroupedWeight]], set[str], str]:
    """Return the result of :func:`speccompile.quantized.gptq.readers` for an MXFP4 checkpoint."""
    names = [name.removesuffix("_blocks") for name in files if name.endswith("_blocks")]
    used = {f"{name}{tensor}" for name in names for tensor in ("_blocks", "_scales")}
    return {name: partial(_read, files, name, source.of(name)) for name in names}, used, MXFP4


def _read(files: TensorFiles, name: str, source: TensorSource) -> GroupedWeight:
    blocks, exponents = (files.get(f"{name}{tensor}", BYTES) for tensor in ("_blocks", "_scales"))
    if blocks.dim() != 4 or blocks.shape[-1] != BLOCK or exponents.shape != blocks.shape[:-1] or not len(blocks):
        shapes = f"blocks {list(blocks.shape)}, scales {list(exponents.shape)}"
        raise source.damaged(f"its shapes do not fit one another: {shapes}")
    scales = powers_of_two(exponents, source).flatten(0, 1)
    return fp4_weight(blocks.flatten(2).flatten(0, 1), scales, source, experts=blocks.shape[0])

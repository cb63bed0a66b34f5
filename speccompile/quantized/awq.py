"""AWQ checkpoints of AutoAWQ, llm-compressor's predecessors and GPTQModel (``version: gemm``).

Source: Lin et al., AWQ (arXiv:2306.00978); the layout of AutoAWQ's ``awq/utils/packing_utils.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch

from speccompile.quantized.affine import affine_weight
from speccompile.quantized.bit_fields import unpack
from speccompile.quantized.files import SCALES, WORDS, TensorFiles
from speccompile.quantized.source import TensorSource
from speccompile.quantized.weight import GroupedWeight

TENSORS = ("qweight", "qzeros", "scales")
BITS = 4
#: The index of output i of eight among the fields of a word.
FIELD = torch.tensor([0, 4, 1, 5, 2, 6, 3, 7])


def readers(
    files: TensorFiles, config: Mapping[str, Any], source: TensorSource
) -> tuple[dict[str, Callable[[], GroupedWeight]], set[str], str]:
    """Return the result of :func:`speccompile.quantized.gptq.readers` for an AWQ checkpoint."""
    layout = str(config.get("version") or config.get("format") or "gemm").lower()
    if layout != "gemm":
        raise source.unsupported(f"its AWQ layout is {layout!r}, and only gemm is read")
    if (bits := config.get("bits", config.get("w_bit", BITS))) != BITS:
        raise source.unsupported(f"its AWQ values have {bits} bits, and only {BITS} are read")
    modules = [name.removesuffix(".qweight") for name in files if name.endswith(".qweight")]
    used = {f"{module}.{tensor}" for module in modules for tensor in TENSORS}
    return {f"{module}.weight": partial(_read, files, module, source.of(module)) for module in modules}, used, "AWQ 4"


def _read(files: TensorFiles, module: str, source: TensorSource) -> GroupedWeight:
    words, zero_words = (files.get(f"{module}.{tensor}", WORDS) for tensor in TENSORS[:2])
    scales = files.get(f"{module}.{TENSORS[2]}", SCALES)
    if words.dim() != 2 or scales.dim() != 2 or tuple(zero_words.shape) != (scales.shape[0], words.shape[1]):
        shapes = f"qweight {list(words.shape)}, qzeros {list(zero_words.shape)}, scales {list(scales.shape)}"
        raise source.damaged(f"its shapes do not fit one another: {shapes}")
    values, zeros = _outputs(words), _outputs(zero_words)
    return affine_weight(source, values, zeros, scales.t(), BITS)


def _outputs(words: torch.Tensor) -> torch.Tensor:
    """Unpack the fields of int32 ``[rows, outputs / 8]`` into ``[outputs, rows]``."""
    fields = unpack(words, BITS, words.shape[1] * 8)
    return fields.unflatten(1, (-1, 8))[..., FIELD].flatten(1).t().contiguous()

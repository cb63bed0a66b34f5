"""Which models have weights that were stored as integers, and were converted to floating point on loading."""

from __future__ import annotations

import torch
from transformers import PreTrainedModel

_DENSE = (torch.float32, torch.bfloat16, torch.float16)
_ATTRIBUTE = "_speccompile_dequantised_from"


def mark_dequantised(model: PreTrainedModel, format: str) -> None:
    """``format`` is that of the checkpoint: ``"GGUF Q4_K"``."""
    setattr(model, _ATTRIBUTE, format)


def dequantised_from(model: PreTrainedModel) -> str:
    """The checkpoint's format if its weights were dequantised, by :func:`speccompile.pretrained.load` or by
    transformers; empty for any other model."""
    own: str = getattr(model, _ATTRIBUTE, "")
    quantizer = getattr(model, "hf_quantizer", None)
    if own or quantizer is None:
        return own
    # transformers keeps the quantiser of a model that it has dequantised. Layouts of libraries have integers, in
    # parameters or in buffers, or float8.
    if any(tensor.dim() > 1 and tensor.dtype not in _DENSE for tensor in (*model.parameters(), *model.buffers())):
        return ""
    method = quantizer.quantization_config.quant_method
    return str(getattr(method, "value", method))

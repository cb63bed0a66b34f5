"""Marks of models whose weights were stored in a quantised format and converted to floating point on loading."""

from __future__ import annotations

import contextlib

import torch
from transformers import PreTrainedModel

from speccompile.errors import DamagedCheckpoint
from speccompile.utils.declared_quantization import declared_quantization
from speccompile.utils.hub import cached_folder

_DENSE = (torch.float32, torch.bfloat16, torch.float16)
_ATTRIBUTE = "_speccompile_dequantised_from"


def mark_dequantised(model: PreTrainedModel, format: str) -> None:
    """Store the checkpoint's ``format``, such as ``"GGUF Q4_K"``, on ``model``."""
    setattr(model, _ATTRIBUTE, format)


def dequantised_from(model: PreTrainedModel) -> str:
    """Return the checkpoint's format if :func:`speccompile.pretrained.load` or transformers dequantised the weights;
    an empty string for any other model."""
    own: str = getattr(model, _ATTRIBUTE, "")
    if own:
        return own
    quantizer = getattr(model, "hf_quantizer", None)
    if quantizer is None:
        # A quantiser of transformers that dequantised a model removes itself, and leaves this attribute.
        return _declared_method(str(model.config.name_or_path)) if vars(model).get("is_quantized") is False else ""
    # Some quantisers stay. Quantised layouts have integers, in parameters or in buffers, or float8.
    if any(tensor.dim() > 1 and tensor.dtype not in _DENSE for tensor in (*model.parameters(), *model.buffers())):
        return ""
    method = quantizer.quantization_config.quant_method
    return str(getattr(method, "value", method))


def _declared_method(name_or_path: str) -> str:
    """Return ``quant_method`` of a checkpoint, whose files may have been deleted."""
    folder = cached_folder(name_or_path)
    with contextlib.suppress(DamagedCheckpoint):
        declared = None if folder is None else declared_quantization(folder)
        if declared is not None:
            return str(declared.get("quant_method"))
    return "a quantised checkpoint"

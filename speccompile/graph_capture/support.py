"""Which models can be captured today; everything else is refused here, with the reason."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from transformers import PreTrainedModel

from speccompile.errors import ModelInTraining, ModelOnSeveralDevices, UnsupportedDtype, UnsupportedModel

FAMILIES = frozenset({"llama"})
# Tables that do not depend on how long the longest sequence of a batch is.
ROPE_TYPES = frozenset({"default", "linear", "llama3", "yarn"})
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class ModelInfo:
    """What modes and messages need to know of the target model: L, V, M, where it lies."""

    name: str
    num_layers: int
    vocab_size: int
    hidden_size: int
    dtype: torch.dtype
    device: torch.device


def inspect_model(model: PreTrainedModel) -> ModelInfo:
    """Check that ``model`` can be captured and say what it is.

    Raises:
        UnsupportedModel, ModelInTraining, ModelOnSeveralDevices, UnsupportedDtype: each says what to do.
    """
    if not isinstance(model, PreTrainedModel):
        raise UnsupportedModel(
            model=type(model).__name__,
            reason="it is not a transformers PreTrainedModel; pass the model itself",
        )
    name = type(model).__name__
    family = model.config.model_type
    if family not in FAMILIES or model.get_output_embeddings() is None:
        raise UnsupportedModel(
            model=name,
            reason=f"only Llama-architecture causal LMs are supported so far, this is {family!r}; "
            "use LlamaForCausalLM or a model with its architecture",
        )
    if getattr(model, "hf_quantizer", None) is not None:
        raise UnsupportedModel(model=name, reason="its weights are quantised; load it with dtype=torch.float32")
    rope = model.config.rope_parameters["rope_type"]
    if rope not in ROPE_TYPES:
        raise UnsupportedModel(
            model=name,
            reason=f"its rotary table ({rope!r}) depends on the longest sequence of the batch; "
            f"supported: {', '.join(sorted(ROPE_TYPES))}",
        )
    if model.training:
        raise ModelInTraining(model=name)
    tensors = [*model.parameters(), *model.buffers()]
    devices = sorted({str(tensor.device) for tensor in tensors})
    if len(devices) > 1:
        raise ModelOnSeveralDevices(model=name, devices=", ".join(devices), first=devices[0])
    if devices == ["meta"]:
        raise UnsupportedModel(model=name, reason="its weights are on the meta device; load them first")
    _check_dtype(name, devices[0], {parameter.dtype for parameter in model.parameters()})
    return ModelInfo(
        name=name,
        num_layers=int(model.config.num_hidden_layers),
        vocab_size=int(model.config.vocab_size),
        hidden_size=int(model.config.hidden_size),
        dtype=next(model.parameters()).dtype,
        device=tensors[0].device,
    )


def _check_dtype(name: str, device: str, dtypes: set[torch.dtype]) -> None:
    if len(dtypes) > 1 or not dtypes <= set(DTYPES):
        raise UnsupportedDtype(
            model=name,
            dtypes=", ".join(sorted(str(dtype) for dtype in dtypes)),
            device=device,
            supported=", ".join(str(dtype) for dtype in DTYPES),
            advice="Call model.to(torch.float32).",
        )


def decoder_layers(model: PreTrainedModel) -> tuple[str, nn.ModuleList]:
    """Module path and list of the decoder layers.

    Raises:
        UnsupportedModel: no module list has the length that the config states.
    """
    for path, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and len(module) == model.config.num_hidden_layers:
            return path, module
    raise UnsupportedModel(model=type(model).__name__, reason="it has no list of decoder layers")


def module_path(model: PreTrainedModel, module: nn.Module) -> str:
    """The name of ``module`` inside ``model``."""
    return next(path for path, candidate in model.named_modules() if candidate is module)

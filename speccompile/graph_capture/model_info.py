"""Facts about a model. Models that cannot be captured are refused here, with the reason."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import nn
from transformers import PreTrainedModel

from speccompile.errors import (
    ModelInTraining,
    ModelOnSeveralDevices,
    OriginalsFreed,
    UnsupportedDtype,
    UnsupportedModel,
)
from speccompile.graph_capture.encoder_decoder import source_positions
from speccompile.ops.cpu.free_originals import originals_freed
from speccompile.ops.cpu.quantized import is_quantized
from speccompile.utils.declared_quantization import rounds_only_kv
from speccompile.utils.dequantised import dequantised_from
from speccompile.utils.torch_private import is_traceable_wrapper_subclass

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class ModelInfo:
    """Facts about the target model for modes and messages: L, V, M, device and dtype.

    ``num_logits`` is the number of tokens that the lm_head can choose, None if its module does not report it.
    ``source_positions`` is the number of positions that the output of its encoder has at most, None without an encoder.
    ``dequantised_from`` is the format of the checkpoint if its integers became floating-point weights, else empty.
    """

    name: str
    num_layers: int
    vocab_size: int
    hidden_size: int
    dtype: torch.dtype
    device: torch.device
    dequantised_from: str = ""
    num_logits: int | None = None
    source_positions: int | None = None


def inspect_model(model: PreTrainedModel) -> ModelInfo:
    """Check that ``model`` can be captured, and return its facts.

    Raises:
        UnsupportedModel, ModelInTraining, OriginalsFreed, ModelOnSeveralDevices, UnsupportedDtype: it cannot be
            captured; the message has the remedy.
    """
    if not isinstance(model, PreTrainedModel):
        raise UnsupportedModel(
            model=type(model).__name__,
            reason="it is not a transformers PreTrainedModel; pass the model itself",
        )
    name = type(model).__name__
    config = model.config.get_text_config(decoder=True)
    head = model.get_output_embeddings()
    if head is None:
        raise UnsupportedModel(
            model=name,
            reason="it has no lm_head (get_output_embeddings() returns None); load it with AutoModelForCausalLM",
        )
    if not model.can_generate():
        reason = "it has no generate() of transformers, so it is not a causal LM; load one with AutoModelForCausalLM"
        raise UnsupportedModel(model=name, reason=reason)
    if in_training(model):
        raise ModelInTraining(model=name)
    if originals_freed(model):
        raise OriginalsFreed(what="it cannot be wrapped again")
    if is_quantized(model):
        raise OriginalsFreed(what="this needs the model's own values")
    _check_dense(model, name)
    _check_scales_were_read(model, name)
    tensors = [*model.parameters(), *model.buffers()]
    devices = sorted({str(tensor.device) for tensor in tensors})
    if len(devices) > 1:
        raise ModelOnSeveralDevices(model=name, devices=", ".join(devices), first=devices[0])
    if devices == ["meta"]:
        raise UnsupportedModel(model=name, reason="its weights are on the meta device; load them first")
    return ModelInfo(
        name=name,
        num_layers=len(decoder_layers(model)[1]),
        vocab_size=int(config.vocab_size),
        hidden_size=int(config.hidden_size),
        dtype=_dtype(model, name, devices[0]),
        device=tensors[0].device,
        dequantised_from=dequantised_from(model),
        num_logits=head.out_features if isinstance(head, nn.Linear) else None,
        source_positions=source_positions(model),
    )


def in_training(model: nn.Module) -> bool:
    """Whether the model is in training mode, or a module of it is and drops values (an adapter added later)."""
    return model.training or any(
        isinstance(module, nn.modules.dropout._DropoutNd) and module.training and module.p > 0
        for module in model.modules()
    )


def _check_dense(model: nn.Module, name: str) -> None:
    """Check that weights are plain tensors.

    Raises:
        UnsupportedModel: a weight is a tensor subclass that holds other tensors, such as torchao's.
    """
    for path, tensor in named_tensors(model).items():
        if is_traceable_wrapper_subclass(tensor):
            kind = f"{type(tensor).__module__.partition('.')[0]}.{type(tensor).__name__}"
            if kind == "torch.DTensor":
                reason = f"its weight {path} is sharded over processes; load the complete weight in each of them"
                raise UnsupportedModel(model=name, reason=reason)
            reason = (
                f"its weight {path} is a {kind}, which has no plain storage that a step could read; load the model "
                "unquantised, and let wrap round it: weights='int8' or 'int4'"
            )
            raise UnsupportedModel(model=name, reason=reason)


def _check_scales_were_read(model: PreTrainedModel, name: str) -> None:
    """Check that the quantisation that the config declares was read. transformers ignores methods that it does not
    know: it loads the numbers, and drops their scales with a warning.

    Raises:
        UnsupportedModel.
    """
    declared = getattr(model.config, "quantization_config", None)
    if declared is None or is_quantised(model) or dequantised_from(model):
        return
    if isinstance(declared, Mapping) and rounds_only_kv(declared):
        return
    method = declared.get("quant_method") if isinstance(declared, Mapping) else declared.quant_method
    reason = (
        f"its config declares weights that {method} quantised, and they were loaded without their scales; load it with "
        "speccompile.pretrained.load, or load the model that it was quantised from"
    )
    raise UnsupportedModel(model=name, reason=reason)


def is_quantised(model: PreTrainedModel) -> bool:
    """Whether transformers loaded the model with a quantiser."""
    return getattr(model, "hf_quantizer", None) is not None


def _dtype(model: PreTrainedModel, name: str, device: str) -> torch.dtype:
    """Return the least precise dtype of the weights: some families keep routers or norms in float32."""
    dtypes = {parameter.dtype for parameter in model.parameters()}
    if is_quantised(model):
        dtypes &= set(DTYPES)
    if not dtypes or not dtypes <= set(DTYPES):
        raise UnsupportedDtype(
            model=name,
            dtypes=", ".join(sorted(str(dtype) for dtype in dtypes)),
            device=device,
            supported=", ".join(str(dtype) for dtype in DTYPES),
            advice="Call model.to(torch.float32).",
        )
    return max(dtypes, key=lambda dtype: torch.finfo(dtype).eps)


def decoder_layers(model: PreTrainedModel) -> tuple[str, nn.ModuleList]:
    """Return module path and list of the decoder layers. Among the outermost lists of the text model, it is the one
    with as many modules as the config states, else the longest. Lists of an encoder or a vision tower, which may be as
    long, do not count.

    Raises:
        UnsupportedModel: the model has no such list.
    """
    config = model.config.get_text_config(decoder=True)
    count = getattr(config, "num_hidden_layers", None)
    of_text: dict[str, bool] = {}
    lists: list[tuple[str, nn.ModuleList]] = []
    of_decoder = model.get_decoder() if model.config.is_encoder_decoder else model
    start = module_path(model, of_decoder)
    for name, module in of_decoder.named_modules():
        path = f"{start}.{name}".strip(".")
        of_text[path] = of_text.get(path.rpartition(".")[0], True)
        if isinstance(module, PreTrainedModel):
            of_text[path] = type(module.config.get_text_config(decoder=True)) is type(config)
        inner = any(path.startswith(f"{outer}.") for outer, _ in lists)
        if of_text[path] and isinstance(module, nn.ModuleList) and not inner:
            lists.append((path, module))
    if not lists:
        raise UnsupportedModel(model=type(model).__name__, reason="it has no list of decoder layers")
    return max(lists, key=lambda found: (len(found[1]) == count, len(found[1])))


def module_path(model: PreTrainedModel, module: nn.Module) -> str:
    """Return the name of ``module`` inside ``model``."""
    return next(path for path, candidate in model.named_modules() if candidate is module)


def named_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return parameters and buffers by each of their names."""
    return {
        **dict(model.named_parameters(remove_duplicate=False)),
        **dict(model.named_buffers(remove_duplicate=False)),
    }


def all_names(model: nn.Module) -> dict[str, list[str]]:
    """Return all names of each parameter and buffer, by each of them. Tied ones have several."""
    tensors = named_tensors(model)
    names: dict[int, list[str]] = {}
    for name, tensor in tensors.items():
        names.setdefault(id(tensor), []).append(name)
    return {name: names[id(tensor)] for name, tensor in tensors.items()}


def tensor_holders(model: nn.Module) -> dict[str, tuple[dict[str, torch.Tensor | None], str]]:
    """Return the dict that holds each parameter and buffer, and its key there, by each of their names."""
    return {
        f"{path}.{name}".removeprefix("."): (holder, name)
        for path, module in model.named_modules(remove_duplicate=False)
        for holder in (module._parameters, module._buffers)
        for name, tensor in holder.items()
        if tensor is not None
    }


def special_tokens(model: PreTrainedModel) -> set[int]:
    """Return ids that the configs name (padding, images, ...). A model may not treat them as ordinary tokens."""
    found: set[int] = set()
    for config in (model.config, model.config.get_text_config(decoder=True), model.generation_config):
        for name, value in config.to_dict().items():
            ids = value if isinstance(value, list) else [value]
            found |= {token for token in ids if "token" in name and isinstance(token, int)}
    return found

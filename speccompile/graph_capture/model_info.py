"""Which models can be captured today; everything else is refused here, with the reason."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from transformers import PreTrainedModel

from speccompile.errors import ModelConsumed, ModelInTraining, ModelOnSeveralDevices, UnsupportedDtype, UnsupportedModel
from speccompile.ops.cpu.consume import is_consumed
from speccompile.ops.cpu.quantized import is_quantized
from speccompile.utils.dequantised import dequantised_from
from speccompile.utils.torch_private import is_traceable_wrapper_subclass

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class ModelInfo:
    """What modes and messages need to know of the target model: L, V, M, where it lies.

    ``num_logits`` is the number of tokens that the lm_head can choose, None where its module does not say it.
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


def inspect_model(model: PreTrainedModel) -> ModelInfo:
    """Check that ``model`` can be captured and say what it is.

    Raises:
        UnsupportedModel, ModelInTraining, ModelConsumed, ModelOnSeveralDevices, UnsupportedDtype: each says what to do.
    """
    if not isinstance(model, PreTrainedModel):
        raise UnsupportedModel(
            model=type(model).__name__,
            reason="it is not a transformers PreTrainedModel; pass the model itself",
        )
    name = type(model).__name__
    config = model.config.get_text_config(decoder=True)
    if model.config.is_encoder_decoder:
        raise UnsupportedModel(model=name, reason="it is an encoder-decoder; a decoder-only model is needed")
    head = model.get_output_embeddings()
    if head is None:
        raise UnsupportedModel(
            model=name,
            reason="it has no lm_head (get_output_embeddings() is None); load it with AutoModelForCausalLM",
        )
    if not model.can_generate():
        reason = "it has no generate() of transformers, so it is not a causal LM; load one with AutoModelForCausalLM"
        raise UnsupportedModel(model=name, reason=reason)
    if in_training(model):
        raise ModelInTraining(model=name)
    if is_consumed(model):
        raise ModelConsumed(what="it cannot be wrapped again")
    if is_quantized(model):
        raise ModelConsumed(what="it can be wrapped again only with weights=QuantizedWeights(...) of all of them")
    _check_dense(model, name)
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
    )


def in_training(model: nn.Module) -> bool:
    """Whether it is in training mode, or one of its modules is and drops values (an adapter that was added later)."""
    return model.training or any(
        isinstance(module, nn.modules.dropout._DropoutNd) and module.training and module.p > 0
        for module in model.modules()
    )


def _check_dense(model: nn.Module, name: str) -> None:
    """Raises UnsupportedModel: a weight is a tensor subclass that holds other tensors, as torchao's are."""
    for path, tensor in named_tensors(model).items():
        if is_traceable_wrapper_subclass(tensor):
            kind = f"{type(tensor).__module__.partition('.')[0]}.{type(tensor).__name__}"
            if kind == "torch.DTensor":
                reason = f"its weight {path} is sharded over processes; load it whole in each of them"
                raise UnsupportedModel(model=name, reason=reason)
            reason = (
                f"its weight {path} is a {kind}, which has no plain storage that a step could read; load the model "
                "unquantised, and let wrap round it: weights='int8' or 'int4'"
            )
            raise UnsupportedModel(model=name, reason=reason)


def is_quantised(model: PreTrainedModel) -> bool:
    """Whether transformers loaded the model with a quantiser."""
    return getattr(model, "hf_quantizer", None) is not None


def _dtype(model: PreTrainedModel, name: str, device: str) -> torch.dtype:
    """The least precise dtype of the weights: some families keep routers or norms in float32."""
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
    """Module path and list of the decoder layers: of the text model's outermost lists the one as long as the config
    states, else the longest. A vision tower's, which may be as long, is not meant.

    Raises:
        UnsupportedModel: there is none.
    """
    config = model.config.get_text_config(decoder=True)
    count = getattr(config, "num_hidden_layers", None)
    of_text: dict[str, bool] = {}
    lists: list[tuple[str, nn.ModuleList]] = []
    for path, module in model.named_modules():
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
    """The name of ``module`` inside ``model``."""
    return next(path for path, candidate in model.named_modules() if candidate is module)


def named_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and buffers by every name they have."""
    return {
        **dict(model.named_parameters(remove_duplicate=False)),
        **dict(model.named_buffers(remove_duplicate=False)),
    }


def all_names(model: nn.Module) -> dict[str, list[str]]:
    """All names of each parameter and buffer, by each of them: tied ones have several."""
    tensors = named_tensors(model)
    names: dict[int, list[str]] = {}
    for name, tensor in tensors.items():
        names.setdefault(id(tensor), []).append(name)
    return {name: names[id(tensor)] for name, tensor in tensors.items()}


def tensor_places(model: nn.Module) -> dict[str, tuple[dict[str, torch.Tensor | None], str]]:
    """The dict that holds each parameter and buffer, and its key there, by every name that it has."""
    return {
        f"{path}.{name}".removeprefix("."): (holder, name)
        for path, module in model.named_modules(remove_duplicate=False)
        for holder in (module._parameters, module._buffers)
        for name, tensor in holder.items()
        if tensor is not None
    }


def special_tokens(model: PreTrainedModel) -> set[int]:
    """Ids that the configs name (padding, images, ...): a model may treat them as something else than text."""
    found: set[int] = set()
    for config in (model.config, model.config.get_text_config(decoder=True), model.generation_config):
        for name, value in config.to_dict().items():
            ids = value if isinstance(value, list) else [value]
            found |= {token for token in ids if "token" in name and isinstance(token, int)}
    return found

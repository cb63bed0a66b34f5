"""transformers models of quantised checkpoints: with the dequantised weights, or without memory for these."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn
from transformers import GenerationConfig, PreTrainedModel
from transformers.utils import GENERATION_CONFIG_NAME

from speccompile.errors import error_line
from speccompile.quantized.checkpoint import Checkpoint
from speccompile.quantized.reading import open_checkpoint
from speccompile.quantized.weight import QuantizedWeights
from speccompile.utils.dequantised import mark_dequantised
from speccompile.utils.model_classes import model_class
from speccompile.utils.parameters import owners_by_parameter, put_parameter


def load_dequantized(path: str | os.PathLike[str]) -> PreTrainedModel:
    """The model with its weights dequantised, float32, in eval mode.

    Args:
        path: as of :func:`speccompile.quantized.read`, whose errors this raises, too.

    Raises:
        UnsupportedCheckpoint: also if a weight is not a parameter of the model (an expert's, where transformers has one
            tensor for all experts), or the model has tensors that the checkpoint lacks.
    """
    checkpoint = open_checkpoint(path)
    skeleton = _skeleton(checkpoint)
    weights = {name: weight.dequantize() for name, weight in checkpoint.weights.items()}
    for name, weight in weights.items():
        if weight.shape != (wanted := skeleton.get_parameter(name).shape):
            raise checkpoint.source.of(name).damaged(f"it is {list(weight.shape)}, and the model's is {list(wanted)}")
    model = _load(checkpoint, type(skeleton), weights)
    mark_dequantised(model, checkpoint.weights.format)
    return model


def load_without_weights(path: str | os.PathLike[str]) -> tuple[PreTrainedModel, QuantizedWeights]:
    """The model with its quantised weights on the meta device, and these. Arguments and errors as above."""
    checkpoint = open_checkpoint(path)
    skeleton = _skeleton(checkpoint)
    # One element each, while transformers loads the other tensors.
    stand_ins = {name: torch.zeros(()).expand(skeleton.get_parameter(name).shape) for name in checkpoint.weights}
    model = _load(checkpoint, type(skeleton), stand_ins)
    owners = owners_by_parameter(model)
    for parameter in {id(found): found for found in map(model.get_parameter, stand_ins)}.values():
        meta = torch.empty(parameter.shape, dtype=parameter.dtype, device="meta")
        put_parameter(owners[id(parameter)], nn.Parameter(meta, requires_grad=False))
    return model, checkpoint.weights


def _skeleton(checkpoint: Checkpoint) -> PreTrainedModel:
    """The model without memory, which has each of the quantised weights as a parameter."""
    try:
        with torch.device("meta"):
            model: PreTrainedModel = model_class(checkpoint.config).from_config(checkpoint.config)
    except Exception as error:
        # As of configs: the errors are of any kind.
        reason = f"transformers builds no model of its config ({error_line(error)})"
        raise checkpoint.source.unsupported(reason) from error
    names = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    if absent := sorted(checkpoint.weights.keys() - names):
        reason = (
            f"a {type(model).__name__} of transformers has no parameter {absent[0]} (of experts it has one for all)"
        )
        raise checkpoint.source.unsupported(reason)
    return model


def _load(checkpoint: Checkpoint, kind: type[PreTrainedModel], weights: dict[str, torch.Tensor]) -> PreTrainedModel:
    """A model over ``weights`` and the checkpoint's other tensors."""
    source = checkpoint.source
    state = weights | {name: tensor.float() for name, tensor in checkpoint.others.items()}
    loaded: tuple[PreTrainedModel, dict[str, Any]]
    try:
        loaded = cast(Any, kind).from_pretrained(
            None, config=checkpoint.config, state_dict=state, dtype=torch.float32, output_loading_info=True
        )
    except (ValueError, RuntimeError) as error:
        raise source.damaged(f"transformers does not load its tensors ({error_line(error)})") from error
    model, found = loaded
    # transformers draws those that are missing, and leaves out those that the model does not have.
    for keys, what in (("missing_keys", "has not"), ("unexpected_keys", "has, and the model has not,")):
        if names := sorted(found[keys]):
            listed = f"{', '.join(names[:3])}{', ...' if len(names) > 3 else ''}"
            raise source.unsupported(f"it {what} {len(names)} tensors of a {kind.__name__} ({listed})")
    model.config._name_or_path = source.path
    if (Path(source.path) / GENERATION_CONFIG_NAME).is_file():
        model.generation_config = GenerationConfig.from_pretrained(source.path)
    return model.eval()

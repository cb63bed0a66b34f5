"""transformers models of quantised checkpoints, with dequantised weights or with weights on the meta device."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn
from transformers import GenerationConfig, PretrainedConfig, PreTrainedModel
from transformers.utils import GENERATION_CONFIG_NAME

from speccompile.errors import error_line
from speccompile.quantized import fp4
from speccompile.quantized.checkpoint import Checkpoint
from speccompile.quantized.experts import joined_experts
from speccompile.quantized.float8 import ROUNDING, open_float8
from speccompile.quantized.packed_folder import PackedFolder
from speccompile.quantized.reading import open_checkpoint, plain_config
from speccompile.quantized.source import TensorSource
from speccompile.quantized.undeclared import check_scales
from speccompile.quantized.weight import QuantizedWeights
from speccompile.utils.declared_quantization import declared_quantization
from speccompile.utils.dequantised import mark_dequantised
from speccompile.utils.model_classes import model_class
from speccompile.utils.parameters import lie_transposed, owners_by_parameter, put_parameter


def load_dequantized(path: str | os.PathLike[str], dtype: torch.dtype | None = None) -> PreTrainedModel:
    """Load a model with dequantised weights, in eval mode.

    Args:
        path: a path for :func:`speccompile.quantized.read`, whose errors this function also raises.
        dtype: of the weights. None: float32, and for floating point of four bits the config's.

    Raises:
        UnsupportedCheckpoint: also if a weight is not a parameter of the model or, of an expert, a part of one, or if
            the checkpoint lacks tensors of the model.
    """
    checkpoint, skeleton = _opened(path)
    if dtype is None:
        dtype = _dense_dtype(checkpoint.config) if checkpoint.weights.format in fp4.FORMATS else torch.float32
    weights = {}
    for name, grouped in checkpoint.weights.items():
        transposed = lie_transposed(skeleton.get_submodule(name.rpartition(".")[0]))
        weight = grouped.dequantize().to(dtype)
        weights[name] = weight = weight.mT.contiguous() if transposed else weight
        if weight.shape != (wanted := skeleton.get_parameter(name).shape):
            raise checkpoint.source.of(name).damaged(f"it is {list(weight.shape)}, and the model's is {list(wanted)}")
    model = _load(checkpoint, type(skeleton), weights, dtype)
    mark_dequantised(model, checkpoint.weights.format)
    return model


def load_float8(folder: Path, dtype: torch.dtype | None) -> PreTrainedModel:
    """Load the model of an FP8 checkpoint with dequantised weights, in eval mode.

    Args:
        dtype: dtype of the weights; None means the config's. Each weight is computed in float32 and rounded once.

    Raises:
        UnsupportedCheckpoint, DamagedCheckpoint: the errors of :func:`speccompile.quantized.float8.open_float8`; also
            if the checkpoint lacks tensors of the model, or if scales are left over.
    """
    source, config = TensorSource(str(folder)), plain_config(folder)
    quantization = declared_quantization(folder)
    assert quantization is not None
    tensors, dequantised = open_float8(folder, quantization)
    skeleton = _skeleton(config, source)
    dtype = dtype or _dense_dtype(config)
    names = skeleton.state_dict().keys()
    state = {
        name: tensors[name].to(dtype) if name in dequantised else tensors[name]
        for name in tensors
        if name in names or name.rpartition(".")[2] not in ROUNDING
    }
    model, found = _from_tensors(type(skeleton), config, state, dtype, source)
    _check_all(found, ("missing_keys", "mismatched_keys"), type(model), source)
    check_scales(found["unexpected_keys"], tensors.keys(), model, source)
    mark_dequantised(model, f"FP8 ({quantization['quant_method']})")
    return model


def load_without_weights(path: str | os.PathLike[str]) -> tuple[PreTrainedModel, QuantizedWeights]:
    """Load a model whose quantised weights are on the meta device, and return these weights separately.

    Arguments and errors are those of :func:`load_dequantized`.
    """
    checkpoint, skeleton = _opened(path)
    substitutes = _substitutes(skeleton, checkpoint.weights, torch.float32)
    model = _load(checkpoint, type(skeleton), substitutes, torch.float32)
    _move_to_meta(model, checkpoint.weights)
    return model, checkpoint.weights


def load_packed(folder: Path) -> tuple[PreTrainedModel, PackedFolder]:
    """Load a model whose packed weights are on the meta device, and return the open folder, which has them.

    Raises:
        DamagedCheckpoint, UnsupportedCheckpoint: those of :class:`~speccompile.quantized.packed_folder.PackedFolder`;
            also if transformers' model has other tensors than the folder.
    """
    packed = PackedFolder(folder)
    config, dtype = plain_config(folder), getattr(torch, packed.manifest.dtype)
    skeleton = _skeleton(config, packed.source)
    _check_named(skeleton, packed.weights, packed.source)
    state = _substitutes(skeleton, packed.weights, dtype) | dict(packed.others)
    model, found = _from_tensors(type(skeleton), config, state, dtype, packed.source)
    _check_all(found, ("missing_keys", "mismatched_keys", "unexpected_keys"), type(model), packed.source)
    _move_to_meta(model, packed.weights)
    return model, packed


def _substitutes(skeleton: PreTrainedModel, names: Iterable[str], dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Tensors of the parameters' shapes, which transformers needs while it loads the others. Each is expanded from one
    element."""
    return {name: torch.zeros((), dtype=dtype).expand(skeleton.get_parameter(name).shape) for name in names}


def _move_to_meta(model: PreTrainedModel, names: Iterable[str]) -> None:
    owners = owners_by_parameter(model)
    for parameter in {id(found): found for found in map(model.get_parameter, names)}.values():
        meta = torch.empty(parameter.shape, dtype=parameter.dtype, device="meta")
        put_parameter(owners[id(parameter)], nn.Parameter(meta, requires_grad=False))


def _skeleton(config: PretrainedConfig, source: TensorSource) -> PreTrainedModel:
    """Build the model on the meta device."""
    try:
        with torch.device("meta"):
            model: PreTrainedModel = model_class(config).from_config(config)
    except Exception as error:
        # Values of a config may cause errors of any kind.
        raise source.unsupported(f"transformers builds no model of its config ({error_line(error)})") from error
    return model


def _opened(path: str | os.PathLike[str]) -> tuple[Checkpoint, PreTrainedModel]:
    """Open a checkpoint, and build its model on the meta device. Weights have the names of the model's parameters."""
    checkpoint = open_checkpoint(path)
    skeleton = _skeleton(checkpoint.config, checkpoint.source)
    parameters = {name: found.shape for name, found in skeleton.named_parameters(remove_duplicate=False)}
    weights = joined_experts(checkpoint.weights, parameters, checkpoint.source)
    _check_named(skeleton, weights, checkpoint.source)
    return replace(checkpoint, weights=weights), skeleton


def _check_named(model: PreTrainedModel, weights: Iterable[str], source: TensorSource) -> None:
    names = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    if absent := sorted(set(weights) - names):
        raise source.unsupported(f"a {type(model).__name__} of transformers has no parameter {absent[0]}")


def _load(
    checkpoint: Checkpoint, kind: type[PreTrainedModel], weights: dict[str, torch.Tensor], dtype: torch.dtype
) -> PreTrainedModel:
    """Build a model of ``dtype`` from ``weights`` and the checkpoint's other tensors."""
    state = weights | {name: tensor.to(dtype) for name, tensor in checkpoint.others.items()}
    model, found = _from_tensors(kind, checkpoint.config, state, dtype, checkpoint.source)
    _check_all(found, ("missing_keys", "mismatched_keys", "unexpected_keys"), kind, checkpoint.source)
    return model


def _from_tensors(
    kind: type[PreTrainedModel],
    config: PretrainedConfig,
    state: dict[str, torch.Tensor],
    dtype: torch.dtype,
    source: TensorSource,
) -> tuple[PreTrainedModel, dict[str, Any]]:
    """Build a model from ``state``, which has the checkpoint's names. Return also what transformers reports."""
    loaded: tuple[PreTrainedModel, dict[str, Any]]
    try:
        loaded = cast(Any, kind).from_pretrained(
            None, config=config, state_dict=state, dtype=dtype, output_loading_info=True, ignore_mismatched_sizes=True
        )
    except (ValueError, RuntimeError) as error:
        raise source.damaged(f"transformers does not load its tensors ({error_line(error)})") from error
    model, found = loaded
    model.config._name_or_path = source.path
    if (Path(source.path) / GENERATION_CONFIG_NAME).is_file():
        model.generation_config = GenerationConfig.from_pretrained(source.path)
    return model.eval(), found


def _check_all(
    found: dict[str, Any], kinds: tuple[str, ...], model: type[PreTrainedModel], source: TensorSource
) -> None:
    """Check that transformers loaded all tensors. It would initialise missing tensors and those of another shape at
    random, and skip unknown ones."""
    for kind in kinds:
        names = sorted(key if isinstance(key, str) else key[0] for key in found[kind])
        if names:
            listed = f"{', '.join(names[:3])}{', ...' if len(names) > 3 else ''}"
            raise source.unsupported(f"it {_WRONG[kind]} {len(names)} tensors of a {model.__name__} ({listed})")


_WRONG = {
    "missing_keys": "lacks",
    "mismatched_keys": "has in another shape",
    "unexpected_keys": "has, and the model lacks,",
}


def _dense_dtype(config: PretrainedConfig) -> torch.dtype:
    """Return the config's dtype, or bfloat16 if the config has none or float8."""
    named = config.dtype or config.get_text_config(decoder=True).dtype
    return named if named in (torch.float32, torch.float16) else torch.bfloat16

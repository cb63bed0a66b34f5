"""LoRA adapters in PEFT's format. Only adapters with the forward ``base(x) + scale * (x @ A.T) @ B.T`` are accepted."""

from __future__ import annotations

import math
import os
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import fields
from pickle import UnpicklingError
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from torch import nn

from speccompile.adapters.buffers import AdapterBuffers, LoraPair
from speccompile.errors import InvalidAdapter, error_line
from speccompile.utils.hub import ADAPTER_CONFIG, unavailable

if TYPE_CHECKING:
    from peft import LoraConfig


#: Fields of a ``LoraConfig`` that are read here, or that concern only training, loading or the base model.
_HARMLESS = frozenset(
    {
        *("task_type", "peft_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision"),
        *("inference_mode", "r", "target_modules", "exclude_modules", "lora_alpha", "lora_dropout", "fan_in_fan_out"),
        *("use_rslora", "init_lora_weights", "layers_to_transform", "layers_pattern", "rank_pattern", "alpha_pattern"),
        *("megatron_config", "megatron_core", "loftq_config", "eva_config", "corda_config", "lora_ga_config"),
        *("qalora_group_size", "runtime_config", "ensure_weight_tying"),
    }
)
#: The reasons why other fields are not supported.
_REASONS = {
    "use_dora": "DoRA scales the base weights",
    "modules_to_save": "the adapter replaces whole modules",
    "bias": "the adapter has biases",
    "lora_bias": "the adapter has biases",
    "trainable_token_indices": "the adapter replaces embeddings",
    "target_parameters": "the adapter adapts weights that are not linears",
    "alora_invocation_tokens": "the adapter starts in the middle of a sequence",
}
#: Initialisations that do not change the base model. The others subtract a matrix from its weights.
_INITS = (True, False, "gaussian", "eva", "orthogonal")
_BASE = "base_model.model."
#: Names of PEFT's file of weights. A folder has one of them.
_WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin")

#: Builds the error for a reason.
Refuse = Callable[[str], InvalidAdapter]


def is_peft(source: Any) -> bool:
    """Whether ``source`` is a ``PeftModel``, or a folder that PEFT wrote."""
    if isinstance(source, str | os.PathLike):
        return os.path.isfile(os.path.join(source, ADAPTER_CONFIG))
    # The classes of peft exist only after an import of peft.
    peft = sys.modules.get("peft")
    return peft is not None and isinstance(source, peft.PeftModel)


def read_adapter(name: str, source: Any, buffers: AdapterBuffers, model: nn.Module) -> dict[str, LoraPair]:
    """Read the adapter ``source``, and check that it fits into the buffers.

    Args:
        name: the adapter's name, for messages.
        source: a folder that ``PeftModel.save_pretrained`` wrote, the name of a repository, or a PEFT model with one
            active adapter.
        model: the wrapped model.

    Raises:
        InvalidAdapter: the adapter cannot be read, is not plain LoRA, or does not fit into the buffers.
    """

    def refuse(reason: str) -> InvalidAdapter:
        shown = f"a {type(source).__name__}" if isinstance(source, nn.Module) else str(source)
        return InvalidAdapter(name=name, source=shown, reason=reason)

    config, tensors, scales = _read(source, refuse)
    matrices = _matrices(tensors, refuse)
    fits = {linear.path: linear for linear in buffers.linears}
    pairs = {}
    for path, (a, b) in matrices.items():
        if path not in fits:
            raise refuse(_unknown(path, model))
        depth, features, rank = fits[path].depth, fits[path].features, a.shape[0]
        if tuple(a.shape) != (rank, depth) or tuple(b.shape) != (features, rank):
            sizes = f"must be [r, {depth}] and [{features}, r], got {list(a.shape)} and {list(b.shape)}"
            raise refuse(f"its matrices for {path} {sizes}")
        if rank > buffers.max_rank:
            raise refuse(f"its rank in {path} is {rank}; wrap with Adapters(max_rank={rank})")
        if not all(matrix.to(buffers.dtype).isfinite().all() for matrix in (a, b)):
            raise refuse(f"its matrices for {path} hold numbers that are not finite in {buffers.dtype}")
        scale = scales[path] if path in scales else _scale(config, path, rank, refuse)
        if not math.isfinite(scale):
            raise refuse(f"its scale in {path} is {scale}")
        pairs[path] = LoraPair(a, b, scale)
    if not pairs:
        raise refuse("it adapts nothing")
    return pairs


def _read(source: Any, refuse: Refuse) -> tuple[LoraConfig, Mapping[str, torch.Tensor], dict[str, float]]:
    """The config; the tensors by PEFT's names; and, if ``source`` is a model, the scales of its layers by path."""
    try:
        import peft
    except ImportError as error:
        raise refuse("peft is not installed; pip install peft") from error
    if isinstance(source, peft.PeftModel):
        active = source.active_adapters
        if len(active) != 1:
            raise refuse(f"it has {len(active)} active adapters; activate one with set_adapter(name)")
        config = _checked_lora(source.peft_config[active[0]], refuse)
        # A caller can change a layer's scale without changing the config.
        scales = {
            path: float(module.scaling[active[0]])
            for path, module in source.get_base_model().named_modules()
            if isinstance(module, peft.tuners.lora.LoraLayer) and active[0] in module.scaling
        }
        return config, peft.get_peft_model_state_dict(source, adapter_name=active[0]), scales
    if not isinstance(source, str | os.PathLike):
        raise refuse("give a folder that peft's save_pretrained wrote, the name of a repository, or a PeftModel")
    if os.path.isdir(source) and not any(os.path.isfile(os.path.join(source, name)) for name in _WEIGHTS):
        # Without this check PEFT searches the hub for a repository of that name.
        raise refuse(f"the folder has no {_WEIGHTS[0]}")
    if (reason := unavailable(os.fspath(source), ADAPTER_CONFIG)) is not None:
        raise refuse(reason)
    try:
        config = _checked_lora(peft.PeftConfig.from_pretrained(os.fspath(source)), refuse)
        return config, peft.load_peft_weights(os.fspath(source), device="cpu"), {}
    except (
        OSError,
        EOFError,
        RuntimeError,
        ValueError,
        TypeError,
        KeyError,
        UnpicklingError,
        SafetensorError,
    ) as error:
        if isinstance(error, InvalidAdapter):
            raise
        raise refuse(f"peft cannot read it ({error_line(error)})") from error


def _checked_lora(config: Any, refuse: Refuse) -> LoraConfig:
    """``config`` itself.

    Raises:
        InvalidAdapter: it is not the config of plain LoRA.
    """
    import peft

    if not isinstance(config, peft.LoraConfig):
        kind = None if config.peft_type is None else config.peft_type.value
        raise refuse(f"its type must be LORA, got {kind}")
    default = peft.LoraConfig()
    for item in fields(config):
        value = getattr(config, item.name)
        ignored = item.name in _HARMLESS or _adds_nothing(item.name, value)
        if not ignored and value != getattr(default, item.name):
            reason = _REASONS.get(item.name, "the adapter does not compute plain LoRA")
            raise refuse(f"{item.name}={value!r} is not supported: {reason}. Merge it instead: merge_and_unload()")
    if config.init_lora_weights not in _INITS:
        reason = "it belongs to other base weights; save it with path_initial_model_for_weight_conversion"
        raise refuse(f"init_lora_weights={config.init_lora_weights!r} is not supported: {reason}")
    return config


def _adds_nothing(field: str, value: Any) -> bool:
    """Whether ``value`` leaves the feature ``field`` unused.

    PEFT writes ``"target_parameters": []`` for models with experts. Empty ``alora_invocation_tokens`` are not unused:
    they never occur in a sequence, so PEFT never applies such an adapter.
    """
    return value in (None, False) or (value in ([], {}, set()) and field != "alora_invocation_tokens")


def _matrices(tensors: Mapping[str, torch.Tensor], refuse: Refuse) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Both matrices of each linear, by its path."""
    found: dict[str, dict[str, torch.Tensor]] = {}
    for key, tensor in tensors.items():
        path, _, kind = key.removesuffix(".weight").rpartition(".")
        if not key.endswith(".weight") or kind not in ("lora_A", "lora_B") or tensor.dim() != 2:
            raise refuse(f"its tensor {key} is not a LoRA matrix of a linear. Merge it instead: merge_and_unload()")
        if not tensor.is_floating_point():
            raise refuse(f"its tensor {key} must be floating point, got {tensor.dtype}")
        found.setdefault(path.removeprefix(_BASE), {})[kind] = tensor
    for path, both in found.items():
        if len(both) == 1:
            raise refuse(f"it must have lora_A and lora_B for {path}, got only {next(iter(both))}")
    return {path: (both["lora_A"], both["lora_B"]) for path, both in found.items()}


def _unknown(path: str, model: nn.Module) -> str:
    name = path.rpartition(".")[2]
    if path not in dict(model.named_modules()):
        return f"it adapts {path}, which the model does not have"
    return (
        f"it adapts {path}, which has no buffers. If this is a linear of a decoder layer, wrap with "
        f"Adapters(modules=(..., {name!r}))"
    )


def _scale(config: LoraConfig, path: str, rank: int, refuse: Refuse) -> float:
    """The scale of the linear at ``path``, by the rules of PEFT's ``LoraModel``.

    Args:
        rank: the rank of the matrices.

    Raises:
        InvalidAdapter: a field of the config is not valid, or gives another rank.
    """
    from peft.utils.other import get_pattern_key

    try:
        ranks, alphas = dict(config.rank_pattern or {}), dict(config.alpha_pattern or {})
        of_config = ranks.get(get_pattern_key(list(ranks), path), config.r)
        alpha = float(alphas.get(get_pattern_key(list(alphas), path), config.lora_alpha))
    except (TypeError, ValueError, re.error) as error:
        reason = f"lora_alpha, rank_pattern or alpha_pattern of its config is not valid ({error_line(error)})"
        raise refuse(reason) from error
    if of_config != rank:
        raise refuse(f"its rank in {path} must be {of_config!r}, as in its config, got {rank}")
    return alpha / (math.sqrt(rank) if config.use_rslora else rank)

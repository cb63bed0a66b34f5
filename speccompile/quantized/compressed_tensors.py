"""compressed-tensors checkpoints as llm-compressor writes them: integers, and floating point of four bits.

Source: compressed-tensors, ``compressors/pack_quantized``, ``quantization/lifecycle/forward_helpers.py`` and
``utils/match.py``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch

from speccompile.quantized.affine import affine_weight
from speccompile.quantized.bit_fields import unpack, words_for
from speccompile.quantized.files import INTEGERS, SCALES, WORDS, TensorFiles
from speccompile.quantized.fp4 import COMPRESSED, fp4_weight, powers_of_two
from speccompile.quantized.source import TensorSource
from speccompile.quantized.weight import GroupedWeight

#: ``mixed-precision``: each group of modules has its own format. ``dense``: weights that are not quantised.
FORMATS = ("pack-quantized", "int-quantized", "naive-quantized", "mixed-precision", "dense", *COMPRESSED)
#: Dtypes of scales of floating point of four bits: powers of two, and FP8.
FP4_SCALES = (torch.uint8, torch.float8_e4m3fn)
#: The prefix of a target that is a regular expression.
REGEX = "re:"
#: Targets that are classes of modules with weights.
CLASSES = ("Linear", "Embedding")
TENSORS = (
    *("weight_packed", "weight_shape", "weight_scale", "weight_zero_point", "weight_g_idx"),
    *("weight_global_scale", "input_global_scale"),
)

#: ``weights`` of the groups of a config that a module may belong to.
Schemes = tuple[Mapping[str, Any], ...]


def readers(
    files: TensorFiles, config: Mapping[str, Any], source: TensorSource
) -> tuple[dict[str, Callable[[], GroupedWeight]], set[str], str]:
    """Return the result of :func:`speccompile.quantized.gptq.readers` for a compressed-tensors checkpoint."""
    check_config(config, source)
    _check_integers(config, source)
    packed = [name.removesuffix(".weight_packed") for name in files if name.endswith(".weight_packed")]
    scaled = {name.removesuffix(".weight_scale") for name in files if name.endswith(".weight_scale")}
    plain = sorted(scaled - set(packed))
    weights: dict[str, Callable[[], GroupedWeight]] = {}
    for module in packed:
        if files.dtype(f"{module}.weight_packed") == "U8":
            weights[f"{module}.weight"] = partial(_read_fp4, files, module, source.of(module))
            continue
        schemes = _schemes(module, config)
        weights[f"{module}.weight"] = partial(_read_packed, files, module, schemes, source.of(module))
    for module in plain:
        if f"{module}.weight" not in files:
            raise source.of(module).damaged("it has scales and no weight")
        if (kind := files.dtype(f"{module}.weight")) != "I8":
            raise source.of(module).unsupported(f"its weight is {kind}, and only integers of 8 bits (I8) are read")
        schemes = _schemes(module, config)
        weights[f"{module}.weight"] = partial(_read_int8, files, module, schemes, source.of(module))
    used = {f"{module}.{tensor}" for module in scaled | set(packed) for tensor in TENSORS}
    used |= {f"{module}.weight" for module in plain}
    return weights, used, f"compressed-tensors {config.get('format', '')}".strip()


def check_config(config: Mapping[str, Any], source: TensorSource) -> None:
    """Check the parts of a config that do not depend on the dtype of weights.

    Raises:
        UnsupportedCheckpoint: weights are sparse, or activations are transformed.
        DamagedCheckpoint: a part of the config has not the type that the library writes.
    """
    groups = config.get("config_groups") or {}
    if not isinstance(groups, Mapping) or not all(isinstance(group, Mapping) for group in groups.values()):
        raise source.damaged("config_groups of its quantization_config must be a mapping of mappings")
    for name, group in groups.items():
        if not all(isinstance(group.get(part) or {}, Mapping) for part in ("weights", "input_activations")):
            raise source.damaged(f"weights and input_activations of its {name} must be mappings")
        _check_targets(group.get("targets") or [], name, source)
    if (sparsity := config.get("sparsity_config") or {}).get("format", "dense") != "dense":
        raise source.unsupported(f"its weights are stored as sparse ones ({sparsity['format']}), which are not read")
    if (config.get("transform_config") or {}).get("config_groups"):
        raise source.unsupported("it transforms activations while it runs (transform_config)")


def _check_integers(config: Mapping[str, Any], source: TensorSource) -> None:
    groups = config.get("config_groups") or {}
    formats = {
        str(config.get("format", "dense")),
        *(str(group["format"]) for group in groups.values() if "format" in group),
    }
    if unread := sorted(format for format in formats - {"None"} if format not in FORMATS):
        reason = f"its compressed-tensors format is {', '.join(unread)}, which has no integers with scales"
        raise source.unsupported(f"{reason}; {', '.join((*FORMATS[:2], *COMPRESSED))} are read")
    for name, group in groups.items():
        weights, activations = group.get("weights") or {}, group.get("input_activations") or {}
        kind = weights.get("type", "int")
        if kind != "int" and (kind, weights.get("num_bits")) != ("float", 4):
            raise source.unsupported(
                f"the weights of its {name} are of type {kind}, and only integers and floats of 4 bits are read"
            )
        if weights.get("strategy") == "block":
            raise source.unsupported(f"the weights of its {name} have scales for blocks of outputs and inputs")
        if activations and not activations.get("dynamic"):
            raise source.unsupported(f"{name} rounds its inputs by stored scales, and steps compute their own scales")
        if group.get("output_activations"):
            raise source.unsupported(f"{name} rounds its outputs")
    if config.get("kv_cache_scheme"):
        raise source.unsupported("it rounds its KV cache (kv_cache_scheme)")


def _check_targets(targets: Any, name: str, source: TensorSource) -> None:
    if not isinstance(targets, list) or not all(isinstance(target, str) for target in targets):
        raise source.damaged(f"targets of its {name} must be a list of strings")
    for target in targets:
        if not target.startswith(REGEX):
            continue
        try:
            re.compile(target.removeprefix(REGEX))
        except re.error as error:
            raise source.damaged(f"target {target!r} of its {name} is not a regular expression ({error})") from None


def _schemes(module: str, config: Mapping[str, Any]) -> Schemes:
    """Return the schemes of the config for a module's weights.

    The order is that of ``match_targets``: the module's name, else the first regular expression in alphabetical order
    that matches its name, else its class. If several groups have the same target, the last one is used. The file does
    not contain the classes of modules, so the result has the schemes of both classes that have weights.
    """
    groups = (config.get("config_groups") or {}).values()
    by_target = {target: group.get("weights") or {} for group in groups for target in group.get("targets") or []}
    if module in by_target:
        return (by_target[module],)
    for target in sorted(by_target):
        if target.startswith(REGEX) and re.match(target.removeprefix(REGEX), module):
            return (by_target[target],)
    of_classes = tuple(weights for target, weights in by_target.items() if target in CLASSES)
    return of_classes or tuple(group.get("weights") or {} for group in groups)


def _read_packed(files: TensorFiles, module: str, schemes: Schemes, source: TensorSource) -> GroupedWeight:
    words, scales = files.get(f"{module}.weight_packed", WORDS), files.get(f"{module}.weight_scale", SCALES)
    shape = files.get(f"{module}.weight_shape", INTEGERS).flatten().tolist()
    if words.dim() != 2 or len(shape) != 2 or words.shape[0] != shape[0]:
        raise source.damaged(f"weight_packed is {list(words.shape)}, for a weight of {shape}")
    outputs, inputs = shape
    bits = _bits(words.shape[1], inputs, schemes, source)
    middle = 1 << (bits - 1)
    values = unpack(words, bits, inputs) - middle
    zeros = _zeros(files, module, schemes, source)
    scales = _by_output(scales, outputs, source)
    if zeros is not None and zeros.dtype == torch.int32:
        if tuple(zeros.shape) != (words_for(outputs, bits), scales.shape[1]):
            raise source.damaged(f"weight_zero_point is {list(zeros.shape)}, for scales of {list(scales.shape)}")
        zeros = (unpack(zeros.t().contiguous(), bits, outputs) - middle).t()
    elif zeros is not None:
        zeros = _by_output(zeros, outputs, source)
    return affine_weight(source, values, zeros, scales, bits, _group_of_input(files, module))


def _read_int8(files: TensorFiles, module: str, schemes: Schemes, source: TensorSource) -> GroupedWeight:
    values = files.get(f"{module}.weight")
    if values.dim() != 2:
        raise source.unsupported(f"its weight has {values.dim()} dimensions, and only weights of 2 are read")
    scales = _by_output(files.get(f"{module}.weight_scale", SCALES), values.shape[0], source)
    zeros = _zeros(files, module, schemes, source)
    if zeros is not None:
        zeros = _by_output(zeros, values.shape[0], source)
    return affine_weight(source, values, zeros, scales, 8, _group_of_input(files, module))


def _read_fp4(files: TensorFiles, module: str, source: TensorSource) -> GroupedWeight:
    packed, stored = files.get(f"{module}.weight_packed"), files.get(f"{module}.weight_scale", FP4_SCALES)
    scales = powers_of_two(stored, source) if stored.dtype == torch.uint8 else stored.float()
    # All scales of NVFP4 are divided by one number.
    whole = files.get_if_any(f"{module}.weight_global_scale", SCALES)
    return fp4_weight(packed, scales if whole is None else scales / whole.float(), source)


def _zeros(files: TensorFiles, module: str, schemes: Schemes, source: TensorSource) -> torch.Tensor | None:
    zeros = files.get_if_any(f"{module}.weight_zero_point", INTEGERS)
    if zeros is None and schemes and not any(weights.get("symmetric", True) for weights in schemes):
        raise source.damaged("it has no weight_zero_point, and its group in the config is not symmetric")
    return zeros


def _by_output(scales: torch.Tensor, outputs: int, source: TensorSource) -> torch.Tensor:
    """``scales`` as ``[N, G]``. They are of that shape, ``[N]``, or one number for all outputs."""
    if scales.numel() == 1:
        return scales.reshape(1, 1).expand(outputs, 1)
    if scales.dim() == 1:
        scales = scales[:, None]
    if scales.dim() != 2 or scales.shape[0] != outputs:
        raise source.damaged(f"it has {outputs} outputs, and scales or zero points of {list(scales.shape)}")
    return scales


def _group_of_input(files: TensorFiles, module: str) -> torch.Tensor | None:
    """Return the group of each input (act-order, which older versions wrote), or None. -1 means the usual order."""
    found = files.get_if_any(f"{module}.weight_g_idx", INTEGERS)
    return None if found is None or bool((found == -1).all()) else found


def _bits(columns: int, inputs: int, schemes: Schemes, source: TensorSource) -> int:
    """Return the bits of a value: the one number of the module's schemes that fills the words."""
    named = [weights.get("num_bits", 8) for weights in schemes]
    fitting = [bits for bits in range(2, 9) if bits in named and words_for(inputs, bits) == columns]
    if len(fitting) != 1:
        reason = f"{columns} words for {inputs} inputs fit none of the config's bits ({', '.join(map(str, named))})"
        raise source.damaged(reason)
    return fitting[0]

"""Quantised weights that no config declares. transformers would load their values as numbers and skip the scales."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel
from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING

from speccompile.quantized.files import FLOATS, INDEX, SINGLE, TensorFiles
from speccompile.quantized.source import TensorSource

#: Last parts of the names of weights. Buffers of integers, such as masks and positions, have other names.
_WEIGHT = re.compile(r"(?:.*\.)?(?:weight|\w+_proj)")
#: Names of tensors that belong to a weight: ``q_proj.weight_scale``, ``experts.down_proj_scale``; bitsandbytes'
#: ``q_proj.weight.absmax``; and MLX's ``q_proj.scales``, beside ``q_proj.weight``.
_OF_WEIGHT = (
    re.compile(r"(.+)_(?:scale\w*|zero_point|zeros|shape|g_idx)"),
    re.compile(r"(.+\.weight)\.\w+"),
)
_BESIDE_WEIGHT = re.compile(r"(.+)\.(?:pre_quant_scale|scales?|biases|zeros|qzeros|g_idx|SCB)")


def is_of_transformers(quantization: Mapping[str, Any]) -> bool:
    """Whether transformers has a loader for a declared scheme."""
    old = any(quantization.get(name) for name in ("load_in_4bit", "load_in_8bit"))
    return old or str(quantization.get("quant_method")) in AUTO_QUANTIZATION_CONFIG_MAPPING


def stored_dtypes(folder: Path) -> dict[str, str]:
    """Return the dtypes of the tensors in the folder's safetensors files, by safetensors' names. The result is empty
    if the folder has no such files: its weights may be pickles, or an adapter's.

    Raises:
        DamagedCheckpoint: a file is missing or truncated.
    """
    if not ((folder / SINGLE).is_file() or (folder / INDEX).is_file()):
        return {}
    files = TensorFiles(folder, TensorSource(str(folder)))
    return {name: files.dtype(name) for name in files}


def check_dtypes(stored: Mapping[str, str], source: TensorSource) -> None:
    """Check that a checkpoint without a declared scheme has floating-point weights.

    Args:
        stored: the result of :func:`stored_dtypes`.

    Raises:
        UnsupportedCheckpoint: a tensor is float8, or a weight has integers.
    """
    for name, dtype in stored.items():
        if dtype.startswith("F8_") or (dtype not in (*FLOATS, "F64") and _WEIGHT.fullmatch(name)):
            reason = f"it is {dtype}, and no quantization_config declares how it is quantised"
            raise source.of(name).unsupported(
                reason, "Give the folder the config.json that was written with its weights"
            )


def check_scales(
    unexpected: Collection[str], stored: Collection[str], model: PreTrainedModel, source: TensorSource
) -> None:
    """Check that no tensor that transformers skipped scales a weight that it loaded.

    Args:
        unexpected: names of the tensors that transformers skipped.
        stored: names of all tensors of the checkpoint.

    Raises:
        UnsupportedCheckpoint: such a tensor exists.
    """
    loaded = {name for name, _ in model.named_parameters(remove_duplicate=False)} | set(stored) - set(unexpected)
    for name in sorted(unexpected):
        found = [pattern.fullmatch(name) for pattern in _OF_WEIGHT]
        weights = {match[1] for match in found if match is not None}
        if (match := _BESIDE_WEIGHT.fullmatch(name)) is not None:
            weights.add(f"{match[1]}.weight")
        if scaled := sorted(weights & loaded):
            raise source.of(name).unsupported(f"{scaled[0]} would be loaded without it")

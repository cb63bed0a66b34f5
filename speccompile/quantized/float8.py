"""FP8 checkpoints with scales: ModelOpt, AutoFP8, FBGEMM, compressed-tensors, and blocks as of DeepSeek. Their weights
are dequantised on loading.

The tensors decide, not the lists of modules in a config: a float8 tensor is multiplied with its scales, and any other
tensor must be floating point. Scales of inputs, outputs and KV are not used, since a step does not round these.

Source: the layouts of vLLM's ``quantization/modelopt.py``, ``fp8.py`` and ``fbgemm_fp8.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch

from speccompile.quantized.checkpoint import OnLookup
from speccompile.quantized.compressed_tensors import check_config
from speccompile.quantized.files import FLOATS, SCALES, TensorFiles
from speccompile.quantized.source import TensorSource

#: safetensors' names of the dtypes of float8 weights.
VALUES = ("F8_E4M3", "F8_E5M2")
#: Suffixes of a weight's scales. Both kinds are multiplied with the weight.
SCALE_SUFFIXES = ("_scale", "_scale_inv")
#: Last parts of the names of scales that round inputs, outputs and KV.
ROUNDING = frozenset(
    {
        *("input_scale", "input_scale_ub", "activation_scale", "act_scale", "output_scale"),
        *("q_scale", "k_scale", "v_scale", "kv_scale", "prob_scale"),
    }
)
#: ``quant_algo`` of ModelOpt: scales of a tensor, and of an output.
MODELOPT = ("FP8", "FP8_PER_CHANNEL_PER_TOKEN")

Block = tuple[int, int]

_INCOMPLETE = "See whether files of the checkpoint are missing, or load the model that it was quantised from"


def is_float8(quantization: Mapping[str, Any]) -> bool:
    """Whether the declared scheme is FP8 that :func:`open_float8` reads."""
    method = quantization.get("quant_method")
    if method == "modelopt":
        return quantization.get("quant_algo") in MODELOPT
    if method == "compressed-tensors":
        kinds = [(weights.get("type"), weights.get("num_bits")) for weights in _group_weights(quantization)]
        return bool(kinds) and all(kind == ("float", 8) for kind in kinds)
    return method in ("fp8", "fbgemm_fp8")


def open_float8(folder: Path, quantization: Mapping[str, Any]) -> tuple[Mapping[str, torch.Tensor], frozenset[str]]:
    """Return the tensors by their names in the checkpoint, and the names of those that are dequantised to float32. The
    others, such as scales of inputs, outputs and KV, have the dtype of the file. A tensor is read at each lookup.

    Raises:
        UnsupportedCheckpoint: a float8 tensor has no scales, or a tensor is neither float8 nor floating point. A lookup
            raises it if scales do not have the shape of a tensor, an output or a block.
        DamagedCheckpoint: no tensor is float8, or a file is truncated. A lookup raises it if a scale is not finite.
    """
    source = TensorSource(str(folder))
    if quantization.get("quant_method") == "compressed-tensors":
        check_config(quantization, source)
    files, block = TensorFiles(folder, source), declared_block(quantization, source)
    weights = {name: _scale_of(name, files, source.of(name)) for name in files if files.dtype(name) in VALUES}
    if not weights:
        raise source.damaged(
            f"its quantization_config is of {quantization['quant_method']}, but none of its tensors is float8"
        )
    others = [name for name in files if name not in weights and name not in weights.values()]
    for name in others:
        if (dtype := files.dtype(name)) not in FLOATS:
            raise source.of(name).unsupported(f"it is {dtype}, and belongs to no float8 weight")
        module, _, last = name.rpartition(".")
        if f"{module}.weight" in weights and last not in ("bias", *ROUNDING):
            raise source.of(name).unsupported("its module has a float8 weight, and no scale of that name is read")
    readers: dict[str, Callable[[], torch.Tensor]] = {name: partial(files.get, name) for name in others}
    for name, scale in weights.items():
        readers[name] = partial(_read, files, name, scale, block, source.of(name))
    return OnLookup(readers), frozenset(weights)


def _scale_of(name: str, files: TensorFiles, source: TensorSource) -> str:
    found = [name + suffix for suffix in SCALE_SUFFIXES if name + suffix in files]
    if len(found) != 1:
        reason = f"it has both {' and '.join(found)}" if found else f"its scales {name}_scale or _scale_inv are missing"
        raise source.unsupported(f"it is {files.dtype(name)}, and {reason}", _INCOMPLETE)
    return found[0]


def _read(files: TensorFiles, name: str, scale: str, block: Block | None, source: TensorSource) -> torch.Tensor:
    return dequantize(files.get(name), files.get(scale, (*SCALES, torch.float8_e8m0fnu)), block, source)


def dequantize(values: torch.Tensor, scales: torch.Tensor, block: Block | None, source: TensorSource) -> torch.Tensor:
    """Multiply float8 ``values`` ``[..., N, K]`` with their scales, in float32.

    Args:
        scales: one number, ``[N]``, a shape that broadcasts to the weight, or one number for each block.
        block: the result of :func:`declared_block`.

    Raises:
        UnsupportedCheckpoint: ``scales`` have another shape.
        DamagedCheckpoint: a scale is not finite.
    """
    scales = scales.float()
    if not bool(scales.isfinite().all()):
        raise source.damaged("a scale is not a finite number")
    return values.float() * _spread(scales, values.shape, block, source)


def _spread(scales: torch.Tensor, shape: torch.Size, block: Block | None, source: TensorSource) -> torch.Tensor:
    """Reshape ``scales`` to broadcast to a weight ``[..., N, K]``. There is one scale for the tensor, for each output
    or for each block."""
    if scales.numel() == 1:
        return scales.reshape(())
    if scales.shape == shape[:1] and len(shape) == 2:
        return scales[:, None]
    if scales.dim() == len(shape):
        if all(size in (1, whole) for size, whole in zip(scales.shape, shape, strict=True)):
            return scales
        if block is not None and len(shape) >= 2:
            rows, columns = block
            blocks = (-(-shape[-2] // rows), -(-shape[-1] // columns))
            if scales.shape == (*shape[:-2], *blocks):
                spread = scales.repeat_interleave(rows, -2)[..., : shape[-2], :]
                return spread.repeat_interleave(columns, -1)[..., : shape[-1]]
    expected = "one scale, one for each output" + (f", or one for each block of {list(block)}" if block else "")
    raise source.unsupported(f"it is {list(shape)} with scales of {list(scales.shape)}, and only {expected} are read")


def declared_block(quantization: Mapping[str, Any], source: TensorSource) -> Block | None:
    """Return the rows and columns that share a scale; None if the declared scheme has no blocks.

    Raises:
        UnsupportedCheckpoint: there are several sizes, or a size is not a pair of ints.
    """
    # As in transformers, blocks of ``fp8`` have this size if the config has no other.
    of_method = {"fp8": [128, 128]}.get(str(quantization.get("quant_method")))
    of_groups = (weights.get("block_structure") for weights in _group_weights(quantization))
    named = [quantization.get("weight_block_size", of_method), *of_groups]
    blocks = [block for block in named if block is not None]
    if not blocks:
        return None
    first = blocks[0]
    is_pair = isinstance(first, list) and len(first) == 2 and all(type(size) is int and size > 0 for size in first)
    if not is_pair or any(block != first for block in blocks):
        raise source.unsupported(f"the blocks of its scales are {blocks}, and only one size [rows, columns] is read")
    return first[0], first[1]


def _group_weights(quantization: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """``weights`` of each group of a compressed-tensors config."""
    groups = quantization.get("config_groups")
    values = groups.values() if isinstance(groups, Mapping) else ()
    weights = [group.get("weights") for group in values if isinstance(group, Mapping)]
    return [item for item in weights if isinstance(item, Mapping)]

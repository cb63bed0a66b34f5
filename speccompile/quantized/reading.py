"""Opening of a quantised checkpoint: a GGUF file, or a folder whose config names a method."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from transformers import AutoConfig, PretrainedConfig

from speccompile.errors import DamagedCheckpoint, PretrainedError, error_line
from speccompile.quantized import awq, compressed_tensors, gptq, modelopt, mxfp4, torchao
from speccompile.quantized.checkpoint import Checkpoint, OnLookup
from speccompile.quantized.files import FLOATS, TensorFiles
from speccompile.quantized.float8 import is_float8
from speccompile.quantized.refused import refuse
from speccompile.quantized.source import TensorSource
from speccompile.quantized.weight import QuantizedWeights
from speccompile.utils.declared_quantization import CONFIG, CONFIG_NAMES, declared_quantization

#: Readers by ``quant_method``.
READERS: dict[str, Callable[[TensorFiles, Mapping[str, Any], TensorSource], Any]] = {
    "gptq": gptq.readers,
    "awq": awq.readers,
    "compressed-tensors": compressed_tensors.readers,
    "torchao": torchao.readers,
    "mxfp4": mxfp4.readers,
    "modelopt": modelopt.readers,
}


def read(path: str | os.PathLike[str]) -> QuantizedWeights:
    """Open the quantised weights of a checkpoint, with the integers that it stores.

    A weight is read from the file at each lookup: the mapping keeps none.

    Args:
        path: a GGUF file, or a folder with ``config.json`` and safetensors files of GPTQ, AWQ, compressed-tensors,
            torchao, MXFP4 or NVFP4.

    Raises:
        UnsupportedCheckpoint: the weights cannot be read exactly; the error names the format, or the tensor and its
            property.
        DamagedCheckpoint: a file is truncated, or its parts do not fit one another. A lookup may also raise both.
        PretrainedError: the file or folder does not exist, or the package that reads it is missing.
    """
    return open_checkpoint(path).weights


def open_checkpoint(path: str | os.PathLike[str]) -> Checkpoint:
    """Open a checkpoint for :func:`read`, with the same arguments and errors."""
    path = Path(path)
    if path.suffix.lower() == ".gguf":
        if not path.is_file():
            raise PretrainedError(f"no such file: {str(path)!r}.", source=str(path), reason="no such file")
        if importlib.util.find_spec("gguf") is None:
            message = f"reading {str(path)!r} needs gguf: pip install 'speccompile[demo]'."
            raise PretrainedError(message, source=str(path), reason="it needs gguf")
        from speccompile.quantized.gguf import open_gguf

        return open_gguf(path)
    if not path.is_dir():
        raise PretrainedError(f"no such folder: {str(path)!r}.", source=str(path), reason="no such folder")
    return _open_folder(path)


def is_read(folder: Path) -> bool:
    """Whether ``folder`` has a quantised checkpoint whose integers can be read."""
    if not (folder / CONFIG).is_file():
        return False
    try:
        quantization = declared_quantization(folder)
    except DamagedCheckpoint:
        return False
    return quantization is not None and has_reader(quantization)


def has_reader(quantization: Mapping[str, Any]) -> bool:
    """Whether a declared scheme has integers that can be read."""
    method = quantization.get("quant_method")
    if method == "modelopt":
        return quantization.get("quant_algo") in modelopt.ALGORITHMS
    return str(method) in READERS and not is_float8(quantization)


def plain_config(folder: Path) -> PretrainedConfig:
    """Return the folder's config without the quantisation.

    Raises:
        UnsupportedCheckpoint: transformers cannot read the config.
    """
    try:
        config: PretrainedConfig = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    except Exception as error:
        # transformers computes with values of the config, so values that are not valid cause errors of any kind.
        reason = f"transformers does not read its config.json ({error_line(error)})"
        raise TensorSource(str(folder)).unsupported(reason) from error
    for part in (config, config.get_text_config(decoder=True)):
        for name in CONFIG_NAMES:
            if hasattr(part, name):
                delattr(part, name)
    return config


def _open_folder(folder: Path) -> Checkpoint:
    source = TensorSource(str(folder))
    quantization = declared_quantization(folder)
    if quantization is None:
        advice = "Load it with speccompile.pretrained.load"
        raise source.unsupported("its config.json has no quantization_config, so it is not quantised", advice)
    if not has_reader(quantization):
        refuse(quantization, tuple(READERS), source)
    method = str(quantization.get("quant_method"))
    files = TensorFiles(folder, source)
    weights, used, format = READERS[method](files, quantization, source)
    if not weights:
        raise source.damaged(f"none of its tensors belongs to {method}")
    others = [name for name in files if name not in used]
    if strange := [name for name in others if files.dtype(name) not in FLOATS]:
        reason = f"it is {files.dtype(strange[0])}, and belongs to no complete weight of {method}"
        raise source.of(strange[0]).unsupported(reason)
    tensors = {name: partial(files.get, name) for name in others}
    return Checkpoint(source, QuantizedWeights(OnLookup(weights), format), OnLookup(tensors), plain_config(folder))

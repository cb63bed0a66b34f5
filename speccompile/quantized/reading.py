"""Opens a quantised checkpoint by what it is: a GGUF file, or a folder whose config names a method."""

from __future__ import annotations

import importlib.util
import json
import os
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from transformers import AutoConfig

from speccompile.errors import DamagedCheckpoint, PretrainedError, error_line
from speccompile.quantized import awq, compressed_tensors, gptq, torchao
from speccompile.quantized.checkpoint import Checkpoint, OnLookup
from speccompile.quantized.files import TensorFiles
from speccompile.quantized.refused import refuse
from speccompile.quantized.source import Source
from speccompile.quantized.weight import QuantizedWeights

#: By ``quant_method``.
READERS: dict[str, Callable[[TensorFiles, Mapping[str, Any], Source], Any]] = {
    "gptq": gptq.readers,
    "awq": awq.readers,
    "compressed-tensors": compressed_tensors.readers,
    "torchao": torchao.readers,
}
#: Kinds of the other tensors, as safetensors names them.
FLOATS = ("F32", "F16", "BF16")
#: Where a config has the quantisation; the second name is of old versions of compressed-tensors.
_CONFIGS = ("quantization_config", "compression_config")


def read(path: str | os.PathLike[str]) -> QuantizedWeights:
    """The quantised weights of a checkpoint, with the integers that it stores.

    A weight is read from the file when it is looked up, and again at each lookup: the mapping holds none.

    Args:
        path: a GGUF file, or a folder with ``config.json`` and safetensors files of GPTQ, AWQ, compressed-tensors or
            torchao.

    Raises:
        UnsupportedCheckpoint: it cannot be read exactly; the error names the format, or the tensor and its property.
        DamagedCheckpoint: it is cut off, or its parts do not fit one another. A lookup may raise both, too.
        PretrainedError: the file or folder does not exist, or a package is missing that reads it.
    """
    return open_checkpoint(path).weights


def open_checkpoint(path: str | os.PathLike[str]) -> Checkpoint:
    """Open what :func:`read` reads. Arguments and errors as there."""
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
    """Whether it is a folder with a quantised checkpoint of a method that has a reader."""
    if not (folder / "config.json").is_file():
        return False
    try:
        quantization = quantization_of(folder)
    except DamagedCheckpoint:
        return False
    return quantization is not None and str(quantization.get("quant_method")) in READERS


def quantization_of(folder: Path) -> Mapping[str, Any] | None:
    """``quantization_config`` of a folder's ``config.json``, None where there is none."""
    try:
        config = json.loads((folder / "config.json").read_text())
    except (OSError, ValueError) as error:
        raise Source(str(folder)).damaged(f"config.json: {error_line(error)}") from error
    if not isinstance(config, dict):
        raise Source(str(folder)).damaged("config.json must be a mapping")
    found = next((config[name] for name in _CONFIGS if name in config), None)
    if found is not None and not isinstance(found, Mapping):
        raise Source(str(folder)).damaged("quantization_config of config.json must be a mapping")
    return found


def _open_folder(folder: Path) -> Checkpoint:
    source = Source(str(folder))
    quantization = quantization_of(folder)
    if quantization is None:
        advice = "Load it with speccompile.pretrained.load"
        raise source.unsupported("its config.json has no quantization_config, so it is not quantised", advice)
    method = str(quantization.get("quant_method"))
    if method not in READERS:
        refuse(method, tuple(READERS), source)
    files = TensorFiles(folder, source)
    weights, used, format = READERS[method](files, quantization, source)
    if not weights:
        raise source.damaged(f"none of its tensors is one of {method}")
    others = [name for name in files if name not in used]
    if strange := [name for name in others if files.dtype(name) not in FLOATS]:
        reason = f"it is {files.dtype(strange[0])}, and belongs to no whole weight of {method}"
        raise source.of(strange[0]).unsupported(reason)
    try:
        config = AutoConfig.from_pretrained(folder)
    except Exception as error:
        # It computes with what a config holds, so that errors of any kind come of values that are not valid.
        raise source.unsupported(f"transformers does not read its config.json ({error_line(error)})") from error
    for name in _CONFIGS:
        if hasattr(config, name):
            delattr(config, name)
    tensors = {name: partial(files.get, name) for name in others}
    return Checkpoint(source, QuantizedWeights(OnLookup(weights), format), OnLookup(tensors), config)

"""Declaration of quantised weights in the files of a checkpoint's folder."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from speccompile.errors import DamagedCheckpoint, error_line

CONFIG = "config.json"
#: NVIDIA ModelOpt's own file. Its older versions write nothing into ``config.json``.
MODELOPT_CONFIG = "hf_quant_config.json"
#: Names of the quantisation in a config. Old versions of compressed-tensors use the second one.
CONFIG_NAMES = ("quantization_config", "compression_config")


def declared_quantization(folder: Path) -> Mapping[str, Any] | None:
    """Return ``quantization_config`` of the folder's ``config.json`` or of its text part, or the contents of ModelOpt's
    file with ``quant_method: modelopt``. Return None if no weights are quantised.

    Raises:
        DamagedCheckpoint: a file cannot be read, or an entry is not a mapping.
    """
    config = _read(folder, CONFIG)
    parts = (config, _mapping(config.get("text_config") or {}, folder, f"text_config of {CONFIG}"))
    found = [(name, part[name]) for part in parts for name in CONFIG_NAMES if part.get(name) is not None]
    if found:
        name, value = found[0]
        declared = _mapping(value, folder, f"{name} of {CONFIG}")
    elif (folder / MODELOPT_CONFIG).is_file():
        quantization = _mapping(
            _read(folder, MODELOPT_CONFIG).get("quantization") or {}, folder, f"quantization of {MODELOPT_CONFIG}"
        )
        declared = {**quantization, "quant_method": "modelopt"}
    else:
        return None
    return None if rounds_only_kv(declared) else declared


def rounds_only_kv(declared: Mapping[str, Any]) -> bool:
    """Return whether a declaration is ModelOpt's of a rounded KV cache, with weights in full precision."""
    return declared.get("quant_method") == "modelopt" and declared.get("quant_algo", "") is None


def _read(folder: Path, name: str) -> Mapping[str, Any]:
    try:
        contents = json.loads((folder / name).read_text())
    except (OSError, ValueError) as error:
        raise DamagedCheckpoint(source=str(folder), reason=f"{name}: {error_line(error)}") from error
    return _mapping(contents, folder, name)


def _mapping(value: Any, folder: Path, what: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise DamagedCheckpoint(source=str(folder), reason=f"{what} must be a mapping")
    return value

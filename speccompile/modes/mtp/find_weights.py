"""Search for multi-token prediction (MTP) modules in the checkpoint that a model was loaded from.

transformers drops the modules' weights when it loads a model, so the files are searched. Only names are read.
"""

from __future__ import annotations

import json
from pathlib import Path

from huggingface_hub import try_to_load_from_cache
from huggingface_hub.utils import HFValidationError
from safetensors import SafetensorError, safe_open
from transformers import PreTrainedModel

from speccompile.errors import InvalidHead, error_line
from speccompile.modes.mtp.layouts import layout_of

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"


def mtp_modules(model: PreTrainedModel) -> int:
    """The number of modules in the model's checkpoint; 0 if its safetensors files are not on this machine.

    Raises:
        InvalidHead: the files are damaged.
    """
    layers = model.config.get_text_config(decoder=True).num_hidden_layers
    names = _names(model)
    layout = layout_of(names, layers)
    if layout is None:
        return 0
    return 1 + max(number for name in names if (number := layout.module_of(name, layers)) is not None)


def _names(model: PreTrainedModel) -> list[str]:
    """The names of the checkpoint's tensors; empty if its files are not on this machine."""
    source = model.config.name_or_path or ""
    index, weights = _file(source, INDEX), _file(source, WEIGHTS)
    try:
        if index is not None:
            return list(json.loads(index.read_text())["weight_map"])
        if weights is not None:
            with safe_open(weights, "pt") as file:
                return list(file.keys())
    except (ValueError, KeyError, SafetensorError) as error:
        reason = (
            f"{index or weights} is damaged ({error_line(error)}); give another mode than 'auto' to skip these files"
        )
        raise InvalidHead(source="that the model's checkpoint may have", reason=reason) from error
    return []


def _file(source: str, name: str) -> Path | None:
    """The path of the file in the folder ``source``, or in the hub's cache; None if it is not there."""
    if not source:
        return None
    if Path(source).is_dir():
        path = Path(source, name)
        return path if path.is_file() else None
    try:
        cached = try_to_load_from_cache(source, name)
    except HFValidationError:
        # Not a hub id: a folder that does not exist any more.
        return None
    return Path(cached) if isinstance(cached, str) else None

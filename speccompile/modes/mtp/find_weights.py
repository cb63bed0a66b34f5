"""Whether the checkpoint that a model came from has multi-token prediction modules.

transformers drops their weights when it loads a model, so the files are looked at: names alone.
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
    """How many modules there are; 0 where there are none, or no safetensors files of the model on this machine.

    Raises:
        InvalidHead: those files are damaged.
    """
    layers = model.config.get_text_config(decoder=True).num_hidden_layers
    names = _names(model)
    layout = layout_of(names, layers)
    if layout is None:
        return 0
    return 1 + max(number for name in names if (number := layout.module_of(name, layers)) is not None)


def _names(model: PreTrainedModel) -> list[str]:
    """Of the checkpoint's tensors."""
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
            f"{index or weights} is damaged ({error_line(error)}); name a mode, and the model's files are not looked at"
        )
        raise InvalidHead(source="that the model's checkpoint may have", reason=reason) from error
    return []


def _file(source: str, name: str) -> Path | None:
    """In the folder, or in the cache of the hub."""
    if not source:
        return None
    if Path(source).is_dir():
        path = Path(source, name)
        return path if path.is_file() else None
    try:
        cached = try_to_load_from_cache(source, name)
    except HFValidationError:
        # A folder that is gone.
        return None
    return Path(cached) if isinstance(cached, str) else None

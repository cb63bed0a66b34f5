"""Whether the checkpoint that a model came from has multi-token prediction modules.

transformers drops their weights when it loads a model, so the files are looked at: names alone.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from pathlib import Path

from huggingface_hub import try_to_load_from_cache
from huggingface_hub.utils import HFValidationError
from safetensors import safe_open
from transformers import PreTrainedModel

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"

#: What their weights are called, with the module's number: DeepSeek's and GLM's are layers behind the last one; MiMo's;
#: Ernie's; Qwen3-Next's, of which there is one.
_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")
_MODULES = (
    re.compile(r"(?:^|\.)mtp_layers\.(\d+)\."),
    re.compile(r"(?:^|\.)mtp_(?:block|linear_proj|emb_norm|hidden_norm)\.(\d+)\."),
    re.compile(r"(?:^|\.)mtp\.layers\.(\d+)\."),
)


def mtp_modules(model: PreTrainedModel) -> int:
    """How many modules there are; 0 where there are none, or no safetensors files of the model on this machine."""
    layers = model.config.get_text_config(decoder=True).num_hidden_layers
    return max((number + 1 for name in _names(model) for number in _numbers(name, layers)), default=0)


def _numbers(name: str, layers: int) -> Iterable[int]:
    for pattern in _MODULES:
        if found := pattern.search(name):
            return [int(found[1])]
    found = _LAYER.search(name)
    return [int(found[1]) - layers] if found and int(found[1]) >= layers else []


def _names(model: PreTrainedModel) -> Iterable[str]:
    """Of the checkpoint's tensors."""
    source = model.config.name_or_path or ""
    if index := _file(source, INDEX):
        names: dict[str, str] = json.loads(index.read_text())["weight_map"]
        return names
    if weights := _file(source, WEIGHTS):
        with safe_open(weights, "pt") as file:
            return list(file.keys())
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

"""The folder of a checkpoint: the given one, or that of a hub id in the cache of huggingface_hub."""

from __future__ import annotations

import json
from pathlib import Path

from huggingface_hub import snapshot_download
from transformers.utils import cached_file

from speccompile.quantized.files import INDEX, SINGLE
from speccompile.utils.declared_quantization import CONFIG, MODELOPT_CONFIG, declared_quantization
from speccompile.utils.hub import cached_folder, is_on_hub
from speccompile.utils.model_names import SMOLLM2, is_gguf, is_hub_id


def config_folder(name_or_path: str) -> Path | None:
    """Folder with the files that declare a quantisation. For a hub id these files are downloaded.

    None if a checkpoint has no config: SmolLM2 by its name, a GGUF file, an adapter.

    Raises:
        OSError: the hub does not have the model, or cannot be reached.
    """
    if name_or_path == SMOLLM2 or is_gguf(name_or_path):
        return None
    folder = cached_folder(name_or_path)
    if not is_hub_id(name_or_path):
        return folder
    if folder is None:
        config = cached_file(name_or_path, CONFIG, _raise_exceptions_for_missing_entries=False)
        if config is None:
            return None
        folder = Path(config).parent
    if declared_quantization(folder) is None and is_on_hub(name_or_path, MODELOPT_CONFIG):
        return Path(snapshot_download(name_or_path, allow_patterns=[CONFIG, MODELOPT_CONFIG]))
    return folder


def whole_folder(name_or_path: str) -> Path:
    """Folder with configs and weights. For a hub id these are downloaded.

    Raises:
        OSError: the hub does not have the model, or cannot be reached.
    """
    if not is_hub_id(name_or_path):
        return Path(name_or_path)
    # A repository may also have its weights in other forms.
    index = Path(snapshot_download(name_or_path, allow_patterns=["*.json"])) / INDEX
    weights = sorted(set(json.loads(index.read_text())["weight_map"].values())) if index.is_file() else [SINGLE]
    return Path(snapshot_download(name_or_path, allow_patterns=weights))

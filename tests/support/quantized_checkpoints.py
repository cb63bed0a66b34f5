"""A tiny checkpoint of every format that is read."""

from __future__ import annotations

from pathlib import Path

import torch
from gguf import GGMLQuantizationType as Kind
from transformers import AutoModelForCausalLM, PreTrainedModel

from support.quantized_folders import LAYOUTS, write_folder
from support.quantized_gguf import write_gguf
from support.tiny import tiny_llama

FORMATS = ("gguf", *LAYOUTS)


def written(name: str, folder: Path) -> tuple[Path, PreTrainedModel]:
    """A checkpoint, and what transformers or the published formula makes of it."""
    if name in LAYOUTS:
        return folder, write_folder(tiny_llama(), folder, name)
    path = folder / "model.gguf"
    write_gguf(tiny_llama(hidden=256, vocab=128), path, lambda tensor: Kind.Q6_K if "ffn" in tensor else Kind.Q4_K)
    return path, AutoModelForCausalLM.from_pretrained(folder, gguf_file=path.name, dtype=torch.float32)

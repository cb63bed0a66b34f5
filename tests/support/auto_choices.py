"""Checkpoints that ``mode="auto"`` finds, and its choice without a wrap."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import LlamaForCausalLM

from speccompile.modes.auto import Auto, Choice

BOTH = ("mtp", "mtp_eagle_one_model", "ngram", "suffix")
#: Weights' names by family, and how many modules they make of a target of two layers.
CHECKPOINTS: dict[str, tuple[list[str], int]] = {
    "none": (["model.layers.0.mlp.up_proj.weight", "model.layers.1.mlp.up_proj.weight"], 0),
    "a target cut short": (["model.layers.2.mlp.up_proj.weight", "model.layers.3.mlp.up_proj.weight"], 0),
    "deepseek": (["model.layers.1.mlp.up_proj.weight", "model.layers.2.eh_proj.weight"], 1),
    "glm, two": (["model.layers.2.enorm.weight", "model.layers.3.enorm.weight"], 2),
    "qwen3-next": (["model.layers.0.x", "mtp.fc.weight", "mtp.layers.0.mlp.up_proj.weight"], 1),
    "mimo": ([f"model.mtp_layers.{number}.input_proj.weight" for number in range(3)], 3),
    "ernie": (["model.mtp_block.0.mlp.up_proj.weight", "model.mtp_emb_norm.0.weight"], 1),
    "beside an image model": (["model.visual.blocks.7.x", "model.language_model.layers.2.eh_proj.weight"], 1),
}


def choose(model: LlamaForCausalLM, *, draft_len: int = 3, slots: int = 1, native: bool = True, **given: Any) -> Choice:
    return Auto(**given).choose(model, BOTH, draft_len=draft_len, slots=slots, native=native)


def checkpoint(folder: Path, names: list[str], *, index: bool) -> str:
    if index:
        weights = {name: "model-00001-of-00001.safetensors" for name in names}
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weights}))
    else:
        save_file({name: torch.zeros(1) for name in names}, folder / "model.safetensors")
    return str(folder)

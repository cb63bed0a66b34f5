"""Speculators that save hidden states."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import LlamaForCausalLM

from speccompile import Speculator, wrap
from speccompile.hidden_states import SaveHiddenStates

LAYERS = (0, 1)


def wrapped(model: LlamaForCausalLM, folder: Path, mode: str, **options: Any) -> Speculator:
    saves = SaveHiddenStates(folder, write_interval=2, eagle3_layers_to_capture=LAYERS)
    sizes: dict[str, Any] = {"tiers": (0, 1, 4), "max_batch": 3, "max_len": 63, "backend": "eager", "policy": "fixed:4"}
    return wrap(model, mode, save_hidden_states=saves, **(sizes | options))

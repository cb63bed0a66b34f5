"""EAGLE-3 checkpoints for one target: written, changed and loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from speccompile.heads import Eagle3Head, load_eagle3
from support import published
from support.published import FLAT, Weights
from support.tiny import tiny_llama

TARGET = tiny_llama(layers=8)


def loaded(folder: Path, tensors: Weights, config: dict[str, Any] = FLAT, **how: Any) -> Eagle3Head:
    return load_eagle3(published.write(folder, tensors, config, **how), TARGET)


def without(tensors: Weights, *names: str) -> Weights:
    return {key: value for key, value in tensors.items() if key not in names}

"""Training of draft heads, and the data for it."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from speccompile.training.acceptance import Acceptance
    from speccompile.training.make import make_texts, most_tokens
    from speccompile.training.online import OnlineTraining
    from speccompile.training.text_files import SavedTexts, Source, TrainingText, read_texts
    from speccompile.training.text_options import TextOptions
    from speccompile.training.train import TrainedHead, train_head
    from speccompile.training.train_options import TrainOptions

__all__ = [
    "Acceptance",
    "OnlineTraining",
    "SavedTexts",
    "Source",
    "TextOptions",
    "TrainOptions",
    "TrainedHead",
    "TrainingText",
    "make_texts",
    "most_tokens",
    "read_texts",
    "train_head",
]

# Imported at first use: the command line reads the options without torch.
_MODULES = {
    "Acceptance": "acceptance",
    "OnlineTraining": "online",
    "SavedTexts": "text_files",
    "Source": "text_files",
    "TextOptions": "text_options",
    "TrainOptions": "train_options",
    "TrainedHead": "train",
    "TrainingText": "text_files",
    "make_texts": "make",
    "most_tokens": "make",
    "read_texts": "text_files",
    "train_head": "train",
}


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

"""Data to train draft heads from."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from speccompile.training.make import make_texts, most_tokens
    from speccompile.training.text_files import SavedTexts, Source, TrainingText, read_texts
    from speccompile.training.text_options import TextOptions

__all__ = ["SavedTexts", "Source", "TextOptions", "TrainingText", "make_texts", "most_tokens", "read_texts"]

# Imported at first use, since the command line reads the options without torch.
_MODULES = {
    "SavedTexts": "text_files",
    "Source": "text_files",
    "TextOptions": "text_options",
    "TrainingText": "text_files",
    "make_texts": "make",
    "most_tokens": "make",
    "read_texts": "text_files",
}


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

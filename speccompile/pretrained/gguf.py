"""GGUF files through transformers: required packages, the progress bar, and attributes that are left on a model."""

from __future__ import annotations

import contextlib
import importlib.util
import io
from contextlib import AbstractContextManager
from typing import Any

from transformers import PreTrainedModel

from speccompile.errors import PretrainedError
from speccompile.utils.model_names import is_gguf


def check_gguf_packages(purpose: str) -> None:
    missing = [name for name in ("accelerate", "gguf") if importlib.util.find_spec(name) is None]
    if missing:
        needed = " and ".join(missing)
        message = f"{purpose} needs {needed}: pip install 'speccompile[demo]'."
        raise PretrainedError(message, source=purpose, reason=f"it needs {needed}")


def without_gguf_bar(name_or_path: str) -> AbstractContextManager[Any]:
    # The GGUF reader draws its own progress bar, which no switch of transformers turns off.
    return contextlib.redirect_stderr(io.StringIO()) if is_gguf(name_or_path) else contextlib.nullcontext()


def forget_quantization(model: PreTrainedModel) -> None:
    """Remove the two attributes for which ``save_pretrained`` refuses a model. Its weights are dequantised by then."""
    del model.config.quantization_config
    del model.hf_quantizer

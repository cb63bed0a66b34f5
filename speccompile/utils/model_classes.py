"""The class of transformers that loads a model for text."""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, PretrainedConfig


def model_class(config: PretrainedConfig) -> Any:
    """Return the auto class that supports ``config``: of causal language models, or of models of images and text
    (Mistral 3, Qwen3-VL).

    Raises:
        ValueError: transformers has neither.
    """
    for kind in (AutoModelForCausalLM, AutoModelForImageTextToText):
        if type(config) in kind._model_mapping:
            return kind
    raise ValueError(
        f"transformers {version('transformers')} has no language model for its model_type {config.model_type!r}"
    )

"""A target that a small head learns within seconds, and its own sequences."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import LlamaForCausalLM

from support.training_data import greedy_texts, learnable, write_texts


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    return learnable()


@pytest.fixture(scope="module")
def texts(model: LlamaForCausalLM, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_texts(tmp_path_factory.mktemp("texts"), model, greedy_texts(model, 200))

"""Settings for all tests, and the real model."""

from __future__ import annotations

import pytest
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from speccompile import pretrained

# The smallest machine that runs the tests has two cores; the same number everywhere also keeps
# the order of reductions, and with it the last bits, the same.
torch.set_num_threads(2)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA GPU")
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(skip)


@pytest.fixture(scope="session")
def smollm2() -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """SmolLM2-135M-Instruct in float32 and its tokenizer: shared, so leave both as they are."""
    return pretrained.load("smollm2")

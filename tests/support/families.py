"""Tiny models of a family by name, and their texts with and without speculation."""

from __future__ import annotations

import random
from typing import Any

import torch
from transformers import PreTrainedModel

from speccompile import Speculator
from speccompile.tools.families import find_families, tiny_model

TIERS = (0, 3)
NEW_TOKENS = 24
WINDOW = 8
# The executable of four rows runs three as well. Below 64 tokens there is one chunk width less to make.
SIZES = {"max_batch": 4, "max_len": 38 + NEW_TOKENS, "backend": "eager"}


def family(name: str, **overrides: Any) -> PreTrainedModel:
    """The tiny random model of a family."""
    return tiny_model(find_families([name])[0], **overrides)


def model_of(name: str, **options: Any) -> PreTrainedModel:
    """The tiny random model of a family, with windows of ``WINDOW``."""
    return family(name, window=WINDOW, **options)


def greedy(model: PreTrainedModel, prompt: list[int]) -> list[int]:
    """transformers' own continuation."""
    ids = torch.tensor([prompt])
    out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW_TOKENS, do_sample=False)
    return out[0, len(prompt) :].tolist()


def speculative(spec: Speculator, prompts: list[list[int]]) -> list[list[int]]:
    """The continuations of a batch that is padded on the left."""
    longest = max(len(prompt) for prompt in prompts)
    ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    return spec.generate(ids, attention_mask=mask, max_new_tokens=NEW_TOKENS)[:, longest:].tolist()


def assert_texts(spec: Speculator, model: PreTrainedModel, prompts: list[list[int]]) -> None:
    assert speculative(spec, prompts) == [greedy(model, prompt) for prompt in prompts]


def periodic(seed: int) -> list[int]:
    return random.Random(seed).sample(range(5, 120), 6) * 7

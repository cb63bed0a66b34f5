"""A wrapped tiny model, and a hook that changes its text."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import LlamaForCausalLM

import speccompile
from speccompile import Speculator

PROMPT = [3, 1, 4, 1, 5]
NEW = 8


def steer(module: nn.Module, inputs: Any, output: Any) -> Any:
    """A steering vector, as probes and control vectors add one."""
    return output + 0.5 if isinstance(output, torch.Tensor) else (output[0] + 0.5, *output[1:])


def wrapped(model: LlamaForCausalLM) -> Speculator:
    return speccompile.wrap(model, "ngram", tiers=(0, 3), max_len=64, backend="eager")


def text(spec: Speculator) -> list[int]:
    ids = torch.tensor([PROMPT])
    return spec.generate(ids, max_new_tokens=NEW)[0, len(PROMPT) :].tolist()

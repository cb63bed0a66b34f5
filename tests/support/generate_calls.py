"""Calls of ``generate``, compared with transformers."""

from __future__ import annotations

from typing import Any

import torch
from transformers import LlamaForCausalLM

from speccompile import Speculator

VOCAB = 128
PAD = 7


def prompts(rows: int = 2, length: int = 5) -> torch.Tensor:
    return torch.randint(8, VOCAB, (rows, length), generator=torch.Generator().manual_seed(0))


def both(model: LlamaForCausalLM, spec: Speculator, ids: torch.Tensor, **arguments: Any) -> torch.Tensor:
    got = spec.generate(ids, torch.ones_like(ids), **arguments)
    expected = model.generate(ids, attention_mask=torch.ones_like(ids), **arguments)
    assert torch.equal(got, expected), f"{got.tolist()} instead of {expected.tolist()}"
    return got

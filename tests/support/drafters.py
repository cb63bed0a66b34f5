"""Draft models, policies and references for the tests of modes that draft by their own network."""

from __future__ import annotations

import random
from typing import Any

import torch
from transformers import LlamaForCausalLM

from speccompile import Speculator
from speccompile.runtime.request import Request
from support.tiny import tiny_llama

TIERS = (0, 1, 3)
MAX_LEN = 128
PENALTIES: dict[str, Any] = {"temperature": 0.8, "top_p": 0.9, "repetition_penalty": 1.2}


def random_drafter(**config: Any) -> LlamaForCausalLM:
    """Nothing like the target, in no size but the vocabulary."""
    return tiny_llama(seed=5, layers=1, hidden=32, heads=2, kv_heads=1, **config)


def ragged(seed: int, rows: int) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(128) for _ in range(rng.choice([1, 2, 5, 17, 33, 66]))] for _ in range(rows)]


def together(spec: Speculator, prompts: list[list[int]], new: int, **options: Any) -> list[list[int]]:
    """Texts of requests that run side by side, request i with seed i."""
    requests: list[Request] = [
        spec.engine.submit(prompt, max_new_tokens=new, seed=index if options else None, **options)
        for index, prompt in enumerate(prompts)
    ]
    return [request.result().token_ids for request in requests]


def drafter_kv(spec: Speculator, slot: int, count: int) -> dict[str, torch.Tensor]:
    """What the drafter keeps of the first ``count`` tokens of a slot."""
    return {name: tensor[slot, :count].clone() for name, tensor in spec.arena.items() if name.startswith("drafter_")}

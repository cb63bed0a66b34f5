"""Models whose linears are packed in different ways, and how they are wrapped: alike, so that steps are made once."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedModel

import speccompile
from speccompile.speculator.speculator import Speculator
from support.tiny import tiny_llama

PROMPTS = torch.randint(1, 128, (2, 24), generator=torch.Generator().manual_seed(2))
NEW = 30


def wrapped(model: PreTrainedModel, **options: Any) -> Speculator:
    options = {"tiers": (0, 3), "max_batch": 2, "max_len": 60, "backend": "eager"} | options
    return speccompile.wrap(model, "ngram", **options)


def greedy(model: Any, ids: torch.Tensor = PROMPTS, new: int = NEW) -> torch.Tensor:
    """transformers' own text after ``ids``, both."""
    result: torch.Tensor = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, do_sample=False, pad_token_id=0
    )
    return result


def with_freed_originals(model: PreTrainedModel, **options: Any) -> Speculator:
    return wrapped(model, **{"free_originals": True} | options)


def gpt2() -> GPT2LMHeadModel:
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=131, n_embd=64, n_layer=2, n_head=4, n_positions=128, bos_token_id=0, eos_token_id=0)
    return GPT2LMHeadModel(config).eval()


MODELS: dict[str, Callable[[], PreTrainedModel]] = {
    "untied": lambda: tiny_llama(attention_bias=True),
    "tied": lambda: tiny_llama(tie_word_embeddings=True),
    "gpt2": gpt2,
    "bfloat16": lambda: tiny_llama(dtype=torch.bfloat16),
}


class Neighbours(torch.nn.Module):
    """Exactly 0, but for the last bits of what it is added to."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + (hidden.sum(1, keepdim=True) * 1e-7)


def with_neighbours() -> PreTrainedModel:
    """A model with an op that depends on what is computed beside a row."""
    model = tiny_llama()
    model.model.norm = torch.nn.Sequential(model.model.norm, Neighbours())
    return model


def watched(model: PreTrainedModel) -> dict[str, weakref.ref[Any]]:
    """Puts every weight into storage whose end can be seen, since an array owns it."""
    refs = {}
    for name, parameter in model.named_parameters():
        array = parameter.detach().numpy().copy()
        parameter.data = torch.from_numpy(array)
        refs[name] = weakref.ref(array)
    return refs


def alive(refs: dict[str, weakref.ref[Any]]) -> set[str]:
    return {name for name, ref in refs.items() if ref() is not None}

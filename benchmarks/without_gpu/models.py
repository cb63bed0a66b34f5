"""Small models of families, and the published models whose layers they stand for."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import PreTrainedModel

from speccompile.tools.families import find_families, tiny_model


@dataclass(frozen=True)
class Model:
    """A published model.

    Args:
        family: by the name that transformers has for it.
        stands_for: one number for each layer of the small model: how many layers of the published one are like it.
        fields: of the small model's config.
    """

    name: str
    family: str
    stands_for: tuple[int, ...]
    fields: dict[str, Any] = field(default_factory=dict)

    @property
    def layers(self) -> int:
        """Of the published model."""
        return sum(self.stands_for)

    def small(self) -> PreTrainedModel:
        """The small model, in bfloat16, with random weights."""
        (family,) = find_families([self.family])
        return tiny_model(family, num_layers=len(self.stands_for), dtype=torch.bfloat16, **self.fields)


MODELS = (
    Model("SmolLM2-135M", "llama", (15, 15), {"tie_word_embeddings": True}),
    Model("Llama-3.1-8B", "llama", (16, 16)),
    Model("Qwen3-8B", "qwen3", (18, 18)),
    Model("Gemma 2 9B", "gemma2", (21, 21)),
    Model("GPT-2", "gpt2", (6, 6)),
    Model("Phi-3-mini", "phi3", (16, 16)),
    Model("Mixtral-8x7B", "mixtral", (16, 16)),
    Model("gpt-oss-20b", "gpt_oss", (12, 12)),
    Model("Command R7B", "cohere2", (24, 8), {"layer_types": ["sliding_attention", "full_attention"]}),
    Model("Qwen3-Next-80B-A3B", "qwen3_next", (36, 12), {"layer_types": ["linear_attention", "full_attention"]}),
    Model("Bamba-9B", "bamba", (29, 3), {"attn_layer_indices": [1]}),
    Model("BLOOM-7B1", "bloom", (15, 15)),
)

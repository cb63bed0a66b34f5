"""Heads in speculators' layout: what they are, and the model that they draft for.

Shared by ``make_speculators_chains.py``, which runs speculators' own model, and by the tests, which read what that
printed. All weights are drawn by name, so that both have the same whatever their versions of transformers.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from support.published import DRAFT_VOCAB, HEAD_DIM, HEADS, HIDDEN, INNER, KV_HEADS, VOCAB

LAYERS = 8
#: Draft tokens of a chain.
DRAFT_LEN = 4
WINDOW = 8

SIZES: dict[str, Any] = dict(
    vocab_size=VOCAB,
    hidden_size=HIDDEN,
    intermediate_size=INNER,
    num_attention_heads=HEADS,
    num_key_value_heads=KV_HEADS,
    head_dim=HEAD_DIM,
    num_hidden_layers=1,
    rms_norm_eps=1e-5,
    max_position_embeddings=2048,
)
_IDS = "eagle_aux_hidden_state_layer_ids"
_SLIDING = {"layer_types": ["sliding_attention"], "sliding_window": WINDOW, "use_sliding_window": True}

#: By name: ``model_type`` and fields of the decoder layers, then those of the head.
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "default ids": ("llama", {}, {}),
    "written ids": ("llama", {}, {_IDS: [1, 3, 7]}),
    "embedding and last layer": ("llama", {}, {_IDS: [0, 4, LAYERS]}),
    "four ids out of order": ("llama", {}, {_IDS: [8, 2, 5, 0]}),
    "norm_before_residual": ("llama", {}, {"norm_before_residual": True}),
    "norm_before_fc": ("llama", {}, {"norm_before_fc": True}),
    "fc_norm": ("llama", {}, {"fc_norm": True}),
    "norm_output": ("llama", {}, {"norm_output": True}),
    "all norms": ("llama", {}, {"norm_before_residual": True, "fc_norm": True, "norm_output": True}),
    "whole vocabulary": ("llama", {}, {"draft_vocab_size": VOCAB}),
    "qwen3": ("qwen3", {}, {"norm_output": True}),
    "qwen3, two layers": ("qwen3", {"num_hidden_layers": 2, "attention_bias": True}, {}),
    "sliding window": ("qwen3", _SLIDING, {}),
    "sliding and full layers": (
        "llama",
        _SLIDING | {"num_hidden_layers": 2, "layer_types": ["full_attention", "sliding_attention"]},
        {"norm_before_residual": True},
    ),
}


def target() -> LlamaForCausalLM:
    """The model that all of them draft for."""
    config = LlamaConfig(
        num_hidden_layers=LAYERS,
        hidden_size=HIDDEN,
        intermediate_size=2 * HIDDEN,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=VOCAB,
        max_position_embeddings=512,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    model = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(drawn(f"target.{name}", tuple(parameter.shape), 0.15))
    return model


def head_tensors(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, torch.Tensor]:
    """Values for the tensors of a head of these shapes."""
    tensors = {
        name: drawn(name, shape, shape[-1] ** -0.5) for name, shape in shapes.items() if name not in ("d2t", "t2d")
    }
    if "d2t" in shapes:
        chosen = torch.randperm(VOCAB, generator=_generator("d2t"))[:DRAFT_VOCAB].sort().values
        tensors["d2t"] = chosen - torch.arange(DRAFT_VOCAB)
        tensors["t2d"] = torch.zeros(VOCAB, dtype=torch.bool).index_fill(0, chosen, True)
    return tensors


def drawn(name: str, shape: tuple[int, ...], spread: float) -> torch.Tensor:
    """Values by name: those of a vector are near 1, since most vectors are the weights of norms."""
    noise = torch.randn(shape, generator=_generator(name))
    if name.endswith("bias"):
        return 0.2 * noise
    return 1 + 0.2 * noise if len(shape) == 1 else spread * noise


def _generator(name: str) -> torch.Generator:
    return torch.Generator().manual_seed(zlib.crc32(name.encode()))

"""Heads in speculators' layout: what they are, and the model that they draft for.

``speculators_chains.json`` has what speculators' own model drafts with them. All weights are drawn by name: they do not
depend on the version of transformers.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from support.published import DRAFT_VOCAB, HIDDEN, VOCAB

LAYERS = 8
#: Draft tokens of a chain.
DRAFT_LEN = 4
WINDOW = 8


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

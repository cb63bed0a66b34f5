"""Models small enough to build in every test."""

from __future__ import annotations

from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM


def tiny_llama(
    seed: int = 0,
    layers: int = 2,
    hidden: int = 64,
    heads: int = 4,
    kv_heads: int = 2,
    vocab: int = 128,
    max_positions: int = 512,
    dtype: torch.dtype = torch.float32,
    tie: bool = False,
    **config: Any,
) -> LlamaForCausalLM:
    """A Llama with random weights, in eval mode, that never stops by itself.

    Args:
        seed: seed of the weights; the caller's random state is left as it was.
        layers, hidden, heads, kv_heads, vocab, max_positions: the sizes.
        dtype: of the weights.
        tie: whether the output layer shares the embedding's weight.
        **config: further fields of ``LlamaConfig``; they win over the defaults here.
    """
    fields: dict[str, Any] = dict(
        num_hidden_layers=layers,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        vocab_size=vocab,
        max_position_embeddings=max_positions,
        tie_word_embeddings=tie,
        # At the usual 0.02 the layers add next to nothing, and greedy text repeats one token.
        initializer_range=0.15,
        # The defaults are ids 1 and 2: random text would stop at a random place.
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = LlamaForCausalLM(LlamaConfig(**(fields | config)))
    return model.to(dtype).eval()

"""Models of a known size, with random weights made on the device: nothing is downloaded."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from transformers import LlamaConfig, LlamaForCausalLM


@dataclass(frozen=True)
class Shape:
    """Sizes of a Llama; those that have a published model are its own."""

    name: str
    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    vocab: int
    tied: bool
    rope_theta: float = 10000.0


#: HuggingFaceTB/SmolLM2-135M.
SMOLLM2 = Shape("SmolLM2-135M", 30, 576, 1536, 9, 3, 49152, True, 100000.0)
#: meta-llama/Llama-3.1-8B.
LLAMA_8B = Shape("Llama-3.1-8B", 32, 4096, 14336, 32, 8, 128256, False, 500000.0)
TINY = Shape("tiny", 6, 64, 128, 4, 2, 256, True)


def make_model(shape: Shape, device: torch.device, dtype: torch.dtype, max_positions: int) -> LlamaForCausalLM:
    """In eval mode; its sequences never end by themselves."""
    config = LlamaConfig(
        num_hidden_layers=shape.layers,
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.hidden // shape.heads,
        vocab_size=shape.vocab,
        max_position_embeddings=max_positions,
        tie_word_embeddings=shape.tied,
        # At the usual 0.02 the layers of a small model add next to nothing, and its sequences repeat one token.
        initializer_range=1.2 * shape.hidden**-0.5,
        rope_parameters={"rope_type": "default", "rope_theta": shape.rope_theta},
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
        dtype=dtype,
    )
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []), device:
            torch.manual_seed(0)
            model = LlamaForCausalLM(config)
    finally:
        torch.set_default_dtype(before)
    return model.eval()

"""GGUF files of tiny Llamas, written by the ``gguf`` package as llama.cpp's converter writes them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFWriter
from gguf.quants import quantize
from transformers import LlamaForCausalLM

#: Types that the package quantises; blocks of the others are drawn.
QUANTISED = {
    GGMLQuantizationType.Q8_0,
    GGMLQuantizationType.Q4_0,
    GGMLQuantizationType.Q4_1,
    GGMLQuantizationType.Q5_0,
    GGMLQuantizationType.Q5_1,
    GGMLQuantizationType.MXFP4,
    GGMLQuantizationType.TQ2_0,
}
#: Where blocks of the others have numbers of half precision, which must be finite.
HALVES = {
    GGMLQuantizationType.Q2_K: (80, 82),
    GGMLQuantizationType.Q3_K: (108,),
    GGMLQuantizationType.Q4_K: (0, 2),
    GGMLQuantizationType.Q5_K: (0, 2),
    GGMLQuantizationType.Q6_K: (208,),
    GGMLQuantizationType.IQ4_NL: (0,),
    GGMLQuantizationType.IQ4_XS: (0,),
}
NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def blocks(weight: np.ndarray, kind: GGMLQuantizationType, seed: int = 0) -> np.ndarray:
    """Bytes uint8 ``[N, bytes]`` of float32 ``[N, K]``: its blocks, or random ones whose values are as large."""
    if kind in QUANTISED:
        return quantize(weight, kind)
    size, nbytes = GGML_QUANT_SIZES[kind]
    generator = np.random.default_rng(seed)
    count = weight.size // size
    drawn = generator.integers(0, 256, (count, nbytes), dtype=np.uint8)
    for start in HALVES[kind]:
        halves = generator.uniform(0.0002, 0.0006, (count, 1)).astype(np.float16)
        drawn[:, start : start + 2] = halves.view(np.uint8).reshape(count, 2)
    return drawn.reshape(weight.shape[0], -1)


def write_gguf(
    model: LlamaForCausalLM,
    path: Path,
    kind_of: Callable[[str], GGMLQuantizationType],
    extra: dict[str, np.ndarray] | None = None,
) -> None:
    """Write ``model`` with the type that ``kind_of`` gives for each weight's GGUF name; norms are float32."""
    config = model.config
    writer = GGUFWriter(path, "llama")
    writer.add_name("tiny")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_rope_dimension_count(config.hidden_size // config.num_attention_heads)
    writer.add_vocab_size(config.vocab_size)
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    for seed, (name, tensor) in enumerate(named(model)):
        weight = tensor.detach().float().numpy()
        short = name.split(".")[-2]
        if short in heads:
            weight = interleaved(weight, heads[short])
        if weight.ndim == 1:
            writer.add_tensor(name, weight)
        else:
            kind = kind_of(name)
            data = weight if kind == GGMLQuantizationType.F32 else blocks(weight, kind, seed)
            writer.add_tensor(name, data, raw_dtype=kind)
    for name, data in (extra or {}).items():
        writer.add_tensor(name, data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write_qwen3_moe(model: Any, path: Path, kind_of: Callable[[str], GGMLQuantizationType]) -> None:
    """Write a Qwen3 with experts of 768, which transformers reads from no field, with the types of ``kind_of``."""
    config = model.config
    writer = GGUFWriter(path, "qwen3moe")
    writer.add_name("tiny")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    writer.add_expert_count(config.num_experts)
    writer.add_expert_used_count(config.num_experts_per_tok)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.hidden_size // config.num_attention_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_vocab_size(config.vocab_size)
    tensors = {"token_embd": model.model.embed_tokens.weight, "output_norm": model.model.norm.weight}
    tensors["output"] = model.lm_head.weight
    for index, layer in enumerate(model.model.layers):
        attention, experts = layer.self_attn, layer.mlp.experts
        gate, up = experts.gate_up_proj.chunk(2, dim=1)
        own = {"attn_norm": layer.input_layernorm.weight, "ffn_norm": layer.post_attention_layernorm.weight}
        own |= {"attn_q_norm": attention.q_norm.weight, "attn_k_norm": attention.k_norm.weight}
        own |= {"attn_q": attention.q_proj.weight, "attn_k": attention.k_proj.weight, "attn_v": attention.v_proj.weight}
        own |= {"attn_output": attention.o_proj.weight, "ffn_gate_inp": layer.mlp.gate.weight}
        own |= {"ffn_gate_exps": gate, "ffn_up_exps": up, "ffn_down_exps": experts.down_proj}
        tensors |= {f"blk.{index}.{name}": tensor for name, tensor in own.items()}
    for seed, (name, tensor) in enumerate(tensors.items()):
        weight = np.ascontiguousarray(tensor.detach().float().numpy())
        kind = kind_of(name)
        if weight.ndim == 1 or kind == GGMLQuantizationType.F32:
            writer.add_tensor(f"{name}.weight", weight)
        else:
            data = blocks(weight.reshape(-1, weight.shape[-1]), kind, seed)
            writer.add_tensor(f"{name}.weight", data.reshape(*weight.shape[:-1], -1), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def named(model: LlamaForCausalLM) -> list[tuple[str, torch.Tensor]]:
    """Its tensors by their GGUF names."""
    found = [("token_embd.weight", model.model.embed_tokens.weight), ("output_norm.weight", model.model.norm.weight)]
    if not model.config.tie_word_embeddings:
        found.append(("output.weight", model.lm_head.weight))
    for index, layer in enumerate(model.model.layers):
        found += [(f"blk.{index}.{short}.weight", layer.get_submodule(path).weight) for path, short in NAMES.items()]
        found.append((f"blk.{index}.attn_norm.weight", layer.input_layernorm.weight))
        found.append((f"blk.{index}.ffn_norm.weight", layer.post_attention_layernorm.weight))
    return found


def interleaved(weight: np.ndarray, heads: int) -> np.ndarray:
    """Rows as llama.cpp's rotary embedding wants them (``LlamaModel.permute`` of its converter)."""
    return weight.reshape(heads, 2, weight.shape[0] // heads // 2, -1).swapaxes(1, 2).reshape(weight.shape)

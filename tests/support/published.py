"""Made-up checkpoints in the layouts that heads are published in."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

Weights = dict[str, torch.Tensor]

HIDDEN, INNER, HEADS, KV_HEADS, HEAD_DIM = 64, 96, 4, 2, 24
VOCAB, DRAFT_VOCAB = 128, 40

FLAT: dict[str, Any] = dict(
    architectures=["LlamaForCausalLMEagle3"],
    model_type="llama",
    hidden_size=HIDDEN,
    intermediate_size=INNER,
    num_attention_heads=HEADS,
    num_key_value_heads=KV_HEADS,
    head_dim=HEAD_DIM,
    num_hidden_layers=1,
    rms_norm_eps=1e-5,
    hidden_act="silu",
    max_position_embeddings=2048,
    vocab_size=VOCAB,
    draft_vocab_size=DRAFT_VOCAB,
    tie_word_embeddings=False,
    torch_dtype="float16",
)


#: What speculators saved of its heads, and what these draft.
SPECULATORS: dict[str, Any] = json.loads(Path(__file__).with_name("speculators_chains.json").read_text())


def speculators(layer: dict[str, Any] | None = None, **fields: Any) -> dict[str, Any]:
    """A config that speculators wrote, nulls included, with these fields of the decoder layers and of the head."""
    written = SPECULATORS["cases"]["default ids"]["config"]
    return written | {"transformer_layer_config": written["transformer_layer_config"] | (layer or {})} | fields


def weights(layer: str = "midlayer", *, layers: int = 1, tapped: int = 3, seed: int = 0) -> Weights:
    """The tensors that every layout has; ``layer`` is the first one's name."""
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator) * shape[-1] ** -0.5

    def norm(size: int) -> torch.Tensor:
        return 1 + 0.2 * torch.randn(size, generator=generator)

    made = {"fc.weight": random(HIDDEN, tapped * HIDDEN)}
    for index in range(layers):
        name = layer if index == 0 else f"layers.{index}"
        inputs = 2 * HIDDEN if index == 0 else HIDDEN
        made[f"{name}.input_layernorm.weight"] = norm(HIDDEN)
        if index == 0:
            made[f"{name}.hidden_norm.weight"] = norm(HIDDEN)
        made[f"{name}.self_attn.q_proj.weight"] = random(HEADS * HEAD_DIM, inputs)
        made[f"{name}.self_attn.k_proj.weight"] = random(KV_HEADS * HEAD_DIM, inputs)
        made[f"{name}.self_attn.v_proj.weight"] = random(KV_HEADS * HEAD_DIM, inputs)
        made[f"{name}.self_attn.o_proj.weight"] = random(HIDDEN, HEADS * HEAD_DIM)
        made[f"{name}.post_attention_layernorm.weight"] = norm(HIDDEN)
        made[f"{name}.mlp.gate_proj.weight"] = random(INNER, HIDDEN)
        made[f"{name}.mlp.up_proj.weight"] = random(INNER, HIDDEN)
        made[f"{name}.mlp.down_proj.weight"] = random(HIDDEN, INNER)
    made["norm.weight"] = norm(HIDDEN)
    made["lm_head.weight"] = random(DRAFT_VOCAB, HIDDEN)
    chosen = torch.randperm(VOCAB, generator=generator)[:DRAFT_VOCAB].sort().values
    made["d2t"] = chosen - torch.arange(DRAFT_VOCAB)
    made["t2d"] = torch.zeros(VOCAB, dtype=torch.bool).index_fill(0, chosen, True)
    return made


def embedding(seed: int = 1) -> torch.Tensor:
    return torch.randn(VOCAB, HIDDEN, generator=torch.Generator().manual_seed(seed))


def write(folder: Path, tensors: Weights, config: dict[str, Any], *, binary: bool = False, files: int = 1) -> Path:
    """A checkpoint in ``folder``."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    if binary:
        torch.save(tensors, folder / "pytorch_model.bin")
        return folder
    names = list(tensors)
    for index in range(files):
        part = {name: tensors[name].contiguous() for name in names[index::files]}
        name = "model.safetensors" if files == 1 else f"model-{index + 1:05}-of-{files:05}.safetensors"
        save_file(part, folder / name)
    return folder

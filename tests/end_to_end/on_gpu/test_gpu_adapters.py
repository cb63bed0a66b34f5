"""Adapters in whole steps on a GPU: each row's text is that of a model with its adapter merged."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from transformers import LlamaForCausalLM

from speccompile import Adapters, Tree
from support.drafters import random_drafter
from support.gpu_texts import NEW, PROMPTS, own_texts, wrapped
from support.tiny import tiny_llama

pytestmark = pytest.mark.gpu

RANK, SCALE = 4, 2.0
TARGETS = ("q_proj", "v_proj", "o_proj", "gate_proj", "down_proj")


def adapter(folder: Path, seed: int) -> LlamaForCausalLM:
    """A folder as PEFT writes it, and the tiny model with its weights merged."""
    merged, generator = tiny_llama(), torch.Generator().manual_seed(seed)
    tensors: dict[str, torch.Tensor] = {}
    for path, module in merged.named_modules():
        if path.endswith(TARGETS) and isinstance(module, torch.nn.Linear):
            a = 0.3 * torch.randn(RANK, module.in_features, generator=generator)
            b = 0.3 * torch.randn(module.out_features, RANK, generator=generator)
            tensors |= {
                f"base_model.model.{path}.lora_A.weight": a,
                f"base_model.model.{path}.lora_B.weight": b,
            }
            module.weight.data += SCALE * b @ a
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": RANK, "lora_alpha": SCALE * RANK}
    config |= {"target_modules": list(TARGETS), "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return merged


@pytest.mark.parametrize("mode", ["ngram", "draft_target"])
def test_rows_with_adapters_of_their_own(mode: str, tmp_path: Path) -> None:
    names: list[str | None] = [None, "one", "two"]
    models = [tiny_llama(), adapter(tmp_path / "one", 1), adapter(tmp_path / "two", 2)]
    wanted = [own_texts(model) for model in models]
    assert wanted[0] != wanted[1] != wanted[2] != wanted[0]
    tree = Tree.dynamic(5, 3, 2)
    options = {"draft": random_drafter().cuda(), "tiers": (0, 3, tree)} if mode == "draft_target" else {}
    with wrapped(tiny_llama().cuda(), mode, adapters=Adapters(2), **options) as spec:
        for name in names[1:]:
            assert name is not None
            spec.add_adapter(name, tmp_path / name)
        for tier in spec.tiers:
            spec.set_tier(tier)
            requests = [
                [spec.engine.submit(p, max_new_tokens=NEW, eos_token_id=[], adapter=name) for p in PROMPTS]
                for name in names
            ]
            assert [[request.result().token_ids for request in group] for group in requests] == wanted
        spec.remove_adapter("one")
        request = spec.engine.submit(PROMPTS[0], max_new_tokens=NEW, eos_token_id=[], adapter="two")
        assert request.result().token_ids == wanted[2][0]

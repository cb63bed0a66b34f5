"""PEFT models with many adapters over a tiny Llama, their folders, and their own texts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model

from support.tiny import tiny_llama

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP = ("gate_proj", "up_proj", "down_proj")


def lora_config(rank: int = 4, targets: Sequence[str] = (*ATTENTION, *MLP), **options: Any) -> LoraConfig:
    """Weights are drawn: by default an adapter begins as one that changes nothing."""
    fields: dict[str, Any] = {"lora_alpha": 2 * rank, "init_lora_weights": False, "task_type": "CAUSAL_LM"} | options
    return LoraConfig(r=rank, target_modules=list(targets), **fields)


def with_adapters(configs: dict[str, LoraConfig], base: Any = None, seed: int = 0) -> PeftModel:
    """A PEFT model with an adapter of random weights for each of ``configs``."""
    names = list(configs)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = get_peft_model(tiny_llama() if base is None else base, configs[names[0]], names[0])
        for name in names[1:]:
            model.add_adapter(name, configs[name])
    return model.eval()


def saved(model: PeftModel, folder: Path) -> dict[str, Path]:
    """The folder of each adapter."""
    model.save_pretrained(str(folder))
    return {name: folder if name == "default" else folder / name for name in model.peft_config}


def own_text(model: PeftModel, adapter: str | None, prompt: list[int], new: int) -> list[int]:
    """transformers' own greedy text with that adapter alone, or with none."""
    ids = torch.tensor([prompt])
    given: dict[str, Any] = {"attention_mask": torch.ones_like(ids), "max_new_tokens": new, "do_sample": False}
    if adapter is None:
        with model.disable_adapter():
            output = model.generate(input_ids=ids, **given)
    else:
        model.set_adapter(adapter)
        output = model.generate(input_ids=ids, **given)
    return output[0, len(prompt) :].tolist()

"""PEFT models: the transformers model inside, with the adapter's layers."""

from __future__ import annotations

import sys
from typing import Any

import torch
from transformers import PreTrainedModel

from speccompile.errors import ModelInTraining, UnsupportedModel
from speccompile.graph_capture.model_info import in_training

#: Tokens of the forward that compares a PEFT model with the model inside.
COMPARED_TOKENS = 8


def inner_model(model: Any) -> Any:
    """Return the transformers model whose ``generate`` a PEFT model calls; return any other object unchanged.

    Adapters that replace layers (LoRA and similar ones) compute everything in that model. Other adapters change the
    model's input (prompt tuning), or choose adapters by it (X-LoRA, activated LoRA). No captured forward does that.
    Raises:
        ModelInTraining: the model is in training mode; call ``eval()`` first.
        UnsupportedModel: the PEFT model computes other logits than the model inside.
    """
    # PEFT models only exist if peft was imported.
    peft = sys.modules.get("peft")
    if peft is None or not isinstance(model, peft.PeftModel | peft.PeftMixedModel):
        return model
    name = type(model).__name__
    inner = model.get_base_model()
    if not isinstance(inner, PreTrainedModel):
        return inner
    if in_training(inner):
        raise ModelInTraining(model=name)
    ids = torch.arange(COMPARED_TOKENS, device=inner.device)[None] % inner.config.get_text_config().vocab_size
    with torch.no_grad():
        outer_logits = model(input_ids=ids, use_cache=False).logits
        inner_logits = inner(input_ids=ids, use_cache=False).logits
    if not torch.equal(outer_logits, inner_logits):
        kinds = ", ".join(sorted({config.peft_type.value for config in model.peft_config.values()}))
        reason = (
            f"its adapter ({kinds}) is not only in the layers of the {type(inner).__name__} inside, and a capture sees "
            "nothing else; use an adapter of layers, such as LoRA, or merge it with model.merge_and_unload()"
        )
        raise UnsupportedModel(model=name, reason=reason)
    return inner

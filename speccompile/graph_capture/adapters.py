"""PEFT models: the transformers model inside, with the adapter's layers in place."""

from __future__ import annotations

import sys
from typing import Any

import torch
from transformers import PreTrainedModel

from speccompile.errors import ModelInTraining, UnsupportedModel
from speccompile.graph_capture.model_info import in_training

#: Tokens of the forward by which a PEFT model is compared with what is inside.
COMPARED_TOKENS = 8


def inner_model(model: Any) -> Any:
    """The transformers model whose ``generate`` a PEFT model calls; anything else as it is.

    Adapters that replace layers (LoRA and its like) compute all they do in there. Others change what the model reads
    (prompt tuning), or choose adapters by it (X-LoRA, activated LoRA), which no captured forward does.

    Raises:
        ModelInTraining: call ``eval()`` first.
        UnsupportedModel: it computes something else than what is inside.
    """
    # Such a model exists only where peft was imported.
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
            f"its adapter ({kinds}) is not in the layers of the {type(inner).__name__} inside alone, which is all that "
            "a capture sees; use an adapter of layers, such as LoRA, or merge it with model.merge_and_unload()"
        )
        raise UnsupportedModel(model=name, reason=reason)
    return inner

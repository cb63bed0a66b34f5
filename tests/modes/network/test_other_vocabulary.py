"""Draft models of the target's vocabulary, padded to another size: they draft the same tokens, and only these."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

from speccompile import Tree, wrap
from support.tiny import greedy, tiny_llama

VOCAB, NEW = 128, 25
#: The last token is one that the smaller draft model does not have.
PROMPT = [5, 17, 5, 17, 9, VOCAB - 1]
SIZES: dict[str, Any] = {"max_batch": 1, "max_len": 63, "backend": "eager"}


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    """It never emits its last eight tokens, which are padding. They are read as the token before them: so a draft
    model without them reads them."""
    model = tiny_llama(vocab=VOCAB)
    with torch.no_grad():
        model.lm_head.weight[VOCAB - 8 :] = 0
        model.lm_head.weight[: VOCAB - 8] *= 3
        model.model.embed_tokens.weight[VOCAB - 8 :] = model.model.embed_tokens.weight[VOCAB - 9]
    return model


def padded(model: LlamaForCausalLM, rows: int) -> LlamaForCausalLM:
    """The model with another number of rows; those that it did not have are likelier than all others."""
    other = tiny_llama(vocab=rows)
    kept = min(rows, VOCAB)
    weights = {key: value.clone() for key, value in model.state_dict().items()}
    for key in ("model.embed_tokens.weight", "lm_head.weight"):
        weights[key] = torch.cat([weights[key][:kept], weights[key][:kept].abs().amax() * torch.ones(rows - kept, 64)])
    other.load_state_dict(weights)
    return other


@pytest.mark.parametrize(
    ("rows", "options", "drawn"),
    [
        (VOCAB + 8, {}, {}),
        (VOCAB - 8, {"fused": False, "acceptance": "rejection"}, {"do_sample": True, "seed": 3, "temperature": 0.7}),
        (VOCAB + 8, {"tiers": (0, Tree.dynamic(6, 3, 2))}, {}),
        (VOCAB - 8, {"mask_token_id": 7}, {}),
    ],
    ids=["chain", "split, drawn", "tree", "masks"],
)
def test_padding_is_neither_drafted_nor_read(
    model: LlamaForCausalLM, rows: int, options: dict[str, Any], drawn: dict[str, Any]
) -> None:
    fields: dict[str, Any] = {"tiers": (0, 3), **SIZES} | options
    with wrap(model, "draft_target", draft=padded(model, rows), **fields) as spec:
        spec.set_tier(fields["tiers"][-1])
        request = spec.engine.submit(PROMPT, max_new_tokens=NEW, eos_token_id=[], **drawn)
        text = request.result().token_ids
        assert drawn or text == greedy(model, PROMPT, NEW)
        if "mask_token_id" not in options:
            assert spec.stats.acceptance_length > 3, "the draft model is the target itself"

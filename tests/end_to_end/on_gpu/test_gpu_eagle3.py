"""EAGLE-3 heads on a GPU: chains, trees, in executables before the step, and all drafts by one forward."""

from __future__ import annotations

from typing import Any

import pytest

from speccompile import Tree
from speccompile.heads import Eagle3Head
from support.gpu_texts import assert_texts, own_texts, wrapped
from support.tiny import tiny_llama

pytestmark = pytest.mark.gpu

CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "in the step": ("eagle3_one_model", {"draft_vocab_size": 50}, {"tiers": (0, 3, Tree.dynamic(5, 3, 2))}),
    "split": ("eagle3", {}, {}),
    "split, with confidence": ("eagle3", {"draft_vocab_size": 70}, {"confidence": True}),
    "all at once": ("eagle3_one_model", {"mask_token_id": 9}, {}),
    "more layers": ("eagle3_one_model", {"num_hidden_layers": 2, "fc_norm": True, "norm_output": True}, {}),
}


@pytest.mark.parametrize("name", CASES)
def test_the_text_is_the_models_own(name: str) -> None:
    mode, fields, options = CASES[name]
    model = tiny_llama(layers=4).cuda()
    head = Eagle3Head.random(model, taps=(0, 1, 2), **fields)
    with wrapped(model, mode, draft=head, **options) as spec:
        assert_texts(spec, own_texts(tiny_llama(layers=4)))
        assert spec.stats.accepted_tokens > 0

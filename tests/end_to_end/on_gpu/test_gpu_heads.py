"""Medusa and DFlash heads on a GPU."""

from __future__ import annotations

from typing import Any

import pytest

from speccompile import Tree
from speccompile.heads import DFlashHead
from support.gpu_texts import PROMPTS, assert_texts, own_texts, texts_at, wrapped
from support.medusa import fitted_heads
from support.tiny import tiny_llama

pytestmark = pytest.mark.gpu


def test_medusa_heads_that_know_the_texts() -> None:
    wanted, model = own_texts(), tiny_llama()
    heads = fitted_heads(model, [prompt + text for prompt, text in zip(PROMPTS, wanted, strict=True)], 3)
    tiers = (0, 3, Tree.static([(0,), (1,), (0, 0), (0, 1), (0, 0, 0)]))
    with wrapped(model.cuda(), "medusa", draft=heads.cuda(), tiers=tiers) as spec:
        assert_texts(spec, wanted)
        spec.stats.reset()
        assert texts_at(spec, 3) == wanted
        assert spec.stats.acceptance_length > 1.5


@pytest.mark.parametrize("options", [{}, {"fused": False}], ids=["in the step", "split"])
@pytest.mark.parametrize("fields", [{}, {"windows": (7, 4)}], ids=["whole", "windows"])
def test_dflash(options: dict[str, Any], fields: dict[str, Any]) -> None:
    model = tiny_llama(layers=4).cuda()
    head = DFlashHead.random(model, 3, block_size=5, num_hidden_layers=2, taps=(0, 2), **fields)
    with wrapped(model, "dflash", draft=head, **options) as spec:
        assert_texts(spec, own_texts(tiny_llama(layers=4)))
        assert spec.stats.accepted_tokens > 0

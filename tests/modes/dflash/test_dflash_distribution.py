"""Sampled texts of steps that draft with a DFlash head have the target's distribution."""

from __future__ import annotations

from typing import Any

import pytest

from speccompile import wrap
from speccompile.heads import DFlashHead
from support.text_laws import distance_of_texts, text_law
from support.tiny import tiny_llama

COUNT, PROMPT = 600, [3, 9, 1, 3, 9, 1, 3]
DRAWN: dict[str, Any] = {"do_sample": True, "top_k": 8, "temperature": 2.0}


@pytest.mark.parametrize(("rule", "fused"), [("rejection", False), ("block", True)])
def test_texts_of_many_seeds_are_distributed_as_the_targets(rule: str, fused: bool) -> None:
    """The first two of three new tokens; the second one comes out of a step with drafts."""
    model = tiny_llama(vocab=16)
    head = DFlashHead.random(model, 15, block_size=4, num_hidden_layers=1, taps=(0, 1))
    options: dict[str, Any] = {"tiers": (0, 3), "max_batch": 16, "max_len": 31, "backend": "eager", "policy": "fixed:3"}
    with wrap(model, "dflash", draft=head, fused=fused, acceptance=rule, **options) as spec:
        requests = [spec.engine.submit(PROMPT, seed=seed * 7919, max_new_tokens=3, **DRAWN) for seed in range(COUNT)]
        spec.engine.run()
        assert 0 < spec.stats.accepted_tokens < spec.stats.draft_tokens
    texts = [tuple(request.new_tokens[:2]) for request in requests]
    assert abs(distance_of_texts(texts, text_law(model, PROMPT, 2, temperature=2.0, top_k=8))) < 3.9

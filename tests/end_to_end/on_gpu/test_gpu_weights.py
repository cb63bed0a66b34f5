"""Rounded weights in whole steps on a GPU: CUDA graphs emit what the printed steps do."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from support.gpu_texts import NEW, TIERS, own_texts, texts_at, wrapped
from support.tiny import tiny_llama

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("weights", ["int8", "int4"])
def test_a_rounded_target(weights: Any) -> None:
    texts: dict[str, list[list[list[int]]]] = {}
    for backend in ("eager", "auto"):
        with wrapped(tiny_llama().cuda(), "ngram", weights=weights, backend=backend) as spec:
            texts[backend] = [texts_at(spec, tier) for tier in TIERS]
    assert texts["eager"][0] == texts["eager"][1]
    assert texts["auto"] == texts["eager"]


@pytest.mark.parametrize("weights", ["int8", "int4"])
def test_a_rounded_target_in_half_precision(weights: Any) -> None:
    """Texts are not compared: what differs in the last bits may be rounded to other integers."""
    with wrapped(tiny_llama(dtype=torch.bfloat16).cuda(), "ngram", weights=weights) as spec:
        assert all(len(text) == NEW for tier in TIERS for text in texts_at(spec, tier))


@pytest.mark.parametrize("weights", ["int8", "int4"])
def test_a_rounded_drafter(weights: Any) -> None:
    options: dict[str, Any] = {"draft": tiny_llama().cuda(), "draft_weights": weights}
    with wrapped(tiny_llama().cuda(), "draft_target", **options) as spec:
        assert all(texts_at(spec, tier) == own_texts() for tier in TIERS)
        spec.stats.reset()
        texts_at(spec, 3)
        assert spec.stats.acceptance_length > 1.3

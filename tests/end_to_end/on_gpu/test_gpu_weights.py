"""Rounded weights in whole steps on a GPU: CUDA graphs emit what the printed steps do."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from support.gpu_texts import TIERS, own_texts, texts_at, wrapped
from support.tiny import tiny_llama

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("weights", ["int8", "int4"])
def test_a_rounded_target(weights: Any, dtype: torch.dtype) -> None:
    texts: dict[str, list[list[list[int]]]] = {}
    for backend in ("eager", "auto"):
        with wrapped(tiny_llama(dtype=dtype).cuda(), "ngram", weights=weights, backend=backend) as spec:
            texts[backend] = [texts_at(spec, tier) for tier in TIERS]
    if dtype == torch.float32:
        assert texts["eager"][0] == texts["eager"][1]
        assert texts["auto"] == texts["eager"]
    else:
        # What differs in the last bits may be rounded to other integers.
        assert all(len(text) == 24 for found in texts.values() for rows in found for text in rows)


@pytest.mark.parametrize("weights", ["int8", "int4"])
def test_a_rounded_drafter(weights: Any) -> None:
    options: dict[str, Any] = {"draft": tiny_llama().cuda(), "draft_weights": weights}
    with wrapped(tiny_llama().cuda(), "draft_target", **options) as spec:
        assert all(texts_at(spec, tier) == own_texts() for tier in TIERS)
        spec.stats.reset()
        texts_at(spec, 3)
        assert spec.stats.acceptance_length > 1.3

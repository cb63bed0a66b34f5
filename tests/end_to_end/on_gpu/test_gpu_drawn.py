"""Drawn texts on a GPU are the same at every tier."""

from __future__ import annotations

from typing import Any

import pytest

from support.drafters import random_drafter
from support.gpu_texts import texts_at, wrapped
from support.tiny import tiny_llama

pytestmark = pytest.mark.gpu

DRAWN: list[dict[str, Any]] = [
    {"do_sample": True, "seed": 11, "temperature": 0.9, "top_k": 30},
    {"do_sample": True, "seed": 5, "temperature": 3.0, "top_p": 0.9, "repetition_penalty": 1.2},
]
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "early_exit": ("early_exit", {"exit_layer": 1}),
    "draft_target": ("draft_target", {}),
    "ngram, int8": ("ngram", {"weights": "int8"}),
    "ngram, int4": ("ngram", {"weights": "int4"}),
}


@pytest.mark.parametrize("name", CASES)
def test_the_tier_changes_nothing(name: str) -> None:
    mode, options = CASES[name]
    if mode == "draft_target":
        options = {"draft": random_drafter().cuda()}
    with wrapped(tiny_llama().cuda(), mode, sampling=True, **options) as spec:
        for drawn in DRAWN:
            plain = texts_at(spec, 0, **drawn)
            assert texts_at(spec, 3, **drawn) == plain == texts_at(spec, 0, **drawn)
        assert spec.stats.draft_tokens > 0

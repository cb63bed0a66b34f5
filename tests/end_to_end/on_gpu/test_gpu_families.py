"""Families on a GPU: windows and a soft cap, norms of queries, experts, sinks. Texts are transformers' on the CPU."""

from __future__ import annotations

import pytest

from support.families import model_of, periodic
from support.gpu_texts import own_texts, texts_at, wrapped

pytestmark = pytest.mark.gpu

PROMPTS = (periodic(seed=2)[:38], [7, 9, 8, 30, 31, 7, 9, 8])


@pytest.mark.parametrize("name", ["gemma2", "qwen3", "mixtral", "gpt_oss", "phi3"])
def test_text_of_a_family(name: str) -> None:
    model = model_of(name)
    wanted = own_texts(model, PROMPTS)
    with wrapped(model.cuda(), "ngram") as spec:
        assert spec.route == "attention"
        assert [texts_at(spec, tier, PROMPTS) for tier in (0, 3)] == [wanted] * 2
        assert spec.stats.draft_tokens > 0

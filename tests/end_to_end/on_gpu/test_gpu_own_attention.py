"""Families whose attention is their own on a GPU: latent (MLA), ALiBi, Falcon's, and indexed keys."""

from __future__ import annotations

import pytest

from support.families import model_of, periodic
from support.gpu_texts import own_texts, texts_at, wrapped

pytestmark = pytest.mark.gpu

PROMPTS = (periodic(seed=2)[:38], [7, 9, 8, 30, 31, 7, 9, 8])


@pytest.mark.parametrize("name", ["deepseek_v3", "bloom", "falcon", "mpt", "deepseek_v32"])
def test_text_of_a_family(name: str) -> None:
    model = model_of(name)
    wanted = own_texts(model, PROMPTS)
    with wrapped(model.cuda(), "ngram") as spec:
        assert spec.route == "eager"
        assert [texts_at(spec, tier, PROMPTS) for tier in (0, 3)] == [wanted] * 2
        assert spec.stats.draft_tokens > 0

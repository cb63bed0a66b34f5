"""Sequences of recurrent targets on a GPU equal those of the model."""

from __future__ import annotations

import pytest

import speccompile
from support.families import model_of

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("name", ["qwen3_next", "bamba", "mamba"])
def test_text_of_a_recurrent_target(name: str) -> None:
    model = model_of(name).cuda()
    with speccompile.wrap(model, "ngram", tiers=(0, 3), max_batch=2, max_len=63) as spec:
        assert spec.check([[9, 8, 7, 9, 8, 7, 9, 8], [5, 6]], max_new_tokens=20)

"""The head of this repository drafts for SmolLM2-135M what the model would write."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import PreTrainedModel, PreTrainedTokenizerBase

import speccompile
from speccompile.cli.models import encode, max_len_for
from speccompile.cli.prompts import BUILT_IN
from speccompile.hidden_states.target_id import is_id_of
from speccompile.training import read_texts

HEAD = Path(__file__).parents[2] / "heads" / "smollm2-135m-instruct"
NEW_TOKENS = 20


@pytest.mark.real
@pytest.mark.parametrize("texts", ["texts", "texts-by-topic"])
def test_its_texts_are_of_the_model(texts: str, smollm2: tuple[PreTrainedModel, PreTrainedTokenizerBase]) -> None:
    """They name it as the version did that wrote them."""
    assert is_id_of(read_texts(HEAD / texts).source.target, smollm2[0])


@pytest.mark.real
def test_it_drafts_where_nothing_is_quoted(smollm2: tuple[PreTrainedModel, PreTrainedTokenizerBase]) -> None:
    model, tokenizer = smollm2
    prompts = [encode(tokenizer, prompt.text) for prompt in BUILT_IN if prompt.category == "other"]
    sizes = {"tiers": (0, 3), "policy": "fixed:3", "max_len": max_len_for(prompts, NEW_TOKENS)}
    with speccompile.wrap(model, "eagle3_one_model", draft=str(HEAD), backend="eager", **sizes) as spec:
        report = spec.check(prompts, max_new_tokens=NEW_TOKENS)
        assert report.largest_logit_change < 1e-3, str(report)
        assert spec.stats.acceptance_length > 1.4

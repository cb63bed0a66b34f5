"""An acceptance rule of the user's own: one class, passed to ``wrap``."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest
import torch
from transformers import LlamaForCausalLM

import speccompile
from speccompile.acceptance import Rule

EXAMPLE = Path(__file__).parents[2] / "examples" / "custom_rule.py"
PROMPT = torch.tensor([[1, 2, 3, 1, 2, 3, 1, 2]])
TINY = {"vocab": 16}


def among_top(k: int) -> Rule:
    rule: Rule = runpy.run_path(str(EXAMPLE))["AmongTop"](k=k)
    return rule


@pytest.mark.parametrize("k", [1, 3, 16])
def test_drafts_stay_that_are_among_the_k_most_likely(model: LlamaForCausalLM, k: int) -> None:
    sizes = {"tiers": (0, 3), "max_len": 63, "backend": "eager", "policy": "fixed:3"}
    with speccompile.wrap(model, "ngram", acceptance=among_top(k), **sizes) as spec:
        text = spec.generate(PROMPT, max_new_tokens=40)
        stats = spec.stats
        greedy = model.generate(PROMPT, max_new_tokens=40, do_sample=False)
        if k == 1:
            assert torch.equal(text, greedy), "only the most likely token stays, which is greedy decoding"
        if k == 16:
            assert stats.accepted_tokens > 0 and stats.rejected_tokens == 0, "every token is among all of them"
        logits = model(text).logits[0, PROMPT.shape[1] - 1 : -1]
        ranks = (logits.argsort(descending=True) == text[0, PROMPT.shape[1] :, None]).int().argmax(-1)
        assert int(ranks.max()) < k

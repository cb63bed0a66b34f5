"""PARD: a draft model that drafts all tokens in one forward over mask tokens."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

from speccompile import Speculator, wrap
from speccompile.errors import InvalidOption
from speccompile.modes.draft_target import DraftTarget
from support.drafters import random_drafter
from support.errors import raises
from support.tiny import random_prompt

MASK, KMAX = 9, 4
SIZES: dict[str, Any] = {"tiers": (0, 1, KMAX), "max_batch": 2, "max_len": 95, "backend": "eager"}


@pytest.fixture(scope="module")
def draft() -> LlamaForCausalLM:
    return random_drafter()


def pard(model: LlamaForCausalLM, draft: Any, **options: Any) -> Speculator:
    options = SIZES | {"policy": f"fixed:{KMAX}", "mask_token_id": MASK} | options
    return wrap(model, "draft_target", draft=draft, **options)


@pytest.fixture(scope="module")
def spec(model: LlamaForCausalLM, draft: LlamaForCausalLM) -> Speculator:
    return pard(model, draft)


def test_one_forward_for_all_drafts(spec: Speculator, draft: LlamaForCausalLM) -> None:
    assert "by one forward" in spec.explain()
    layers = draft.config.num_hidden_layers
    counts = [
        spec.engine.tiers[tier, 1, "greedy"].graph.op_counts().get("drafter_decoder_layer", 0) for tier in (0, 1, KMAX)
    ]
    # What was not read is one forward, drafting another.
    assert counts == [0, 2 * layers, 2 * layers]


def test_rules_and_shared_noise(spec: Speculator, model: LlamaForCausalLM, draft: LlamaForCausalLM) -> None:
    drawn: dict[str, Any] = {"do_sample": True, "temperature": 60.0, "top_k": 0, "seed": 3, "max_new_tokens": 40}
    spec.set_tier(KMAX)
    spec.stats.reset()
    spec.generate(torch.tensor([random_prompt(8)]), **drawn)
    assert spec.stats.accepted_tokens / spec.stats.draft_tokens > 0.5
    with pard(model, draft, acceptance="block") as one:
        one.generate(torch.tensor([random_prompt(8)]), **drawn)
        assert one.stats.accepted_tokens / one.stats.draft_tokens > 0.5


@pytest.mark.parametrize("mask", [-1, 128, True, "9"])
def test_what_is_no_token_is_refused(model: LlamaForCausalLM, draft: LlamaForCausalLM, mask: Any) -> None:
    with raises(InvalidOption, name="mask_token_id", reason=re.compile("below 128")):
        pard(model, draft, mask_token_id=mask)


@pytest.mark.parametrize("key", ["pard_token", "ptd_token_id"])
def test_a_draft_model_s_config_names_its_mask_token(model: LlamaForCausalLM, tmp_path: Path, key: str) -> None:
    """As published: PARD's checkpoints have it, and nothing has to be said of them."""
    draft = random_drafter()
    setattr(draft.config, key, MASK)
    draft.save_pretrained(tmp_path)
    for given in (draft, str(tmp_path)):
        mode = DraftTarget(draft=given).loaded(model)
        assert mode.mask_token_id == MASK and mode.one_forward and "all tokens in one forward" in mode.explain()
    assert DraftTarget(draft=draft, mask_token_id=3).loaded(model).mask_token_id == 3
    assert DraftTarget(draft=random_drafter()).loaded(model).mask_token_id is None
    setattr(draft.config, key, 128)
    with raises(InvalidOption, name="mask_token_id", reason=re.compile("below 128")):
        DraftTarget(draft=draft).loaded(model)

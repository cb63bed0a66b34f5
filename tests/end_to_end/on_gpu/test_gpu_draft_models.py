"""Draft models on a GPU: in the step, in executables before it, and all drafts by one forward."""

from __future__ import annotations

import pytest
from transformers import LlamaForCausalLM

from speccompile import Tree
from support.drafters import random_drafter
from support.gpu_texts import assert_texts, own_texts, texts_at, wrapped
from support.tiny import tiny_llama

pytestmark = pytest.mark.gpu

TREE = Tree.dynamic(5, 3, 2)


def own_copy() -> LlamaForCausalLM:
    """Drafts of the target's own weights are right."""
    return tiny_llama().cuda()


@pytest.mark.parametrize("fused", [True, False], ids=["fused", "split"])
def test_the_models_own_weights_draft(fused: bool) -> None:
    with wrapped(own_copy(), "draft_target", draft=own_copy(), fused=fused, tiers=(0, 3, TREE)) as spec:
        assert_texts(spec, own_texts())
        spec.stats.reset()
        assert texts_at(spec, 3) == own_texts()
        assert spec.stats.acceptance_length > 2.5


def test_one_forward_drafts_all_tokens() -> None:
    drafter = random_drafter().cuda()
    with wrapped(own_copy(), "draft_target", draft=drafter, mask_token_id=9) as spec:
        assert "by one forward" in spec.explain()
        assert_texts(spec, own_texts())
        assert spec.stats.accepted_tokens > 0


def test_the_target_rounded_drafts() -> None:
    with wrapped(own_copy(), "draft_target", draft="self:int8") as spec:
        assert_texts(spec, own_texts())
        assert spec.stats.acceptance_length > 1.5

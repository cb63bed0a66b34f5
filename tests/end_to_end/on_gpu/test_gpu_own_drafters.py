"""Predicted texts, drafters of the user's own, and several drafters on a GPU."""

from __future__ import annotations

import pytest
import torch

from speccompile import Tree
from speccompile.heads import Eagle3Head
from support.gpu_texts import NEW, PROMPTS, TIERS, assert_texts, own_texts, texts_at, wrapped
from support.medusa import OneAfterAnother, fitted_heads
from support.tiny import tiny_llama

pytestmark = pytest.mark.gpu


def repeats(tokens: torch.Tensor, length: torch.Tensor, draft_len: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The text's first tokens again; rows of an odd length abstain."""
    return tokens[:, :draft_len], torch.where(length % 2 == 0, draft_len, 0)


def test_a_prediction_that_is_right() -> None:
    wanted = own_texts()
    with wrapped(tiny_llama().cuda(), "prediction") as spec:
        for tier in TIERS:
            spec.set_tier(tier)
            requests = [
                spec.engine.submit(prompt, max_new_tokens=NEW, eos_token_id=[], prediction=text)
                for prompt, text in zip(PROMPTS, wanted, strict=True)
            ]
            assert [request.result().token_ids for request in requests] == wanted
        assert spec.stats.accepted_tokens > NEW
        assert_texts(spec, wanted)


def test_a_function_in_the_step() -> None:
    with wrapped(tiny_llama().cuda(), "user_provided", draft=repeats) as spec:
        assert_texts(spec, own_texts())
        assert spec.stats.draft_tokens > 0


def test_a_module_that_reads_hidden_states() -> None:
    wanted, model = own_texts(), tiny_llama()
    heads = fitted_heads(model, [prompt + text for prompt, text in zip(PROMPTS, wanted, strict=True)], 3)
    drafter = OneAfterAnother(heads).eval().cuda()
    with wrapped(model.cuda(), "user_provided", draft=drafter, reads_hidden=(0, "model.norm")) as spec:
        assert texts_at(spec, 3) == wanted
        assert spec.stats.acceptance_length > 1.5
        assert_texts(spec, wanted)


def test_a_function_on_the_host() -> None:
    wanted = own_texts()
    known = [prompt + text for prompt, text in zip(PROMPTS, wanted, strict=True)]

    def draft(tokens: list[int], draft_len: int) -> list[int]:
        return next((text[len(tokens) :][:draft_len] for text in known if text[: len(tokens)] == tokens), [])

    with wrapped(tiny_llama().cuda(), "user_provided", draft=draft, host=True) as spec:
        assert texts_at(spec, 3) == wanted
        assert spec.stats.acceptance_length > 2
        assert_texts(spec, wanted)


@pytest.mark.parametrize("tree", [None, Tree.dynamic(nodes=5, depth=3, branches=2)])
def test_recycled_tokens(tree: Tree | None) -> None:
    wanted = own_texts()
    tiers = TIERS if tree is None else (0, tree)
    with wrapped(tiny_llama().cuda(), "recycle", tiers=tiers, min_probability=0.0) as spec:
        for tier in (*tiers, tiers[-1]):
            assert texts_at(spec, tier) == wanted
        assert spec.stats.accepted_tokens > NEW


def test_a_lookup_before_a_head() -> None:
    model = tiny_llama(layers=4).cuda()
    head = Eagle3Head.random(model, taps=(0, 1, 2))
    with wrapped(model, ["ngram", "eagle3_one_model"], draft=head) as spec:
        assert_texts(spec, own_texts(tiny_llama(layers=4)))
        assert spec.stats.draft_tokens > 0

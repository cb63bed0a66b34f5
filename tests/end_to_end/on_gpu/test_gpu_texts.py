"""Sequences that a GPU emits equal those of the model."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import speccompile
from speccompile import Tree
from support.drafters import random_drafter
from support.tiny import greedy, random_prompt, tiny_llama

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("backend", ["eager", "inductor", "auto"])
@pytest.mark.parametrize("mode", ["none", "ngram", "early_exit"])
def test_the_text_is_the_models_own(backend: str, mode: str) -> None:
    model = tiny_llama().cuda()
    prompts = [random_prompt(9, seed=1), random_prompt(30, seed=2), [5, 6, 7] * 6]
    options: dict[str, Any] = {"exit_layer": 1} if mode == "early_exit" else {}
    wanted = []
    for prompt in prompts:
        ids = torch.tensor([prompt], device="cuda")
        output = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=40, do_sample=False)
        wanted.append(output[0, len(prompt) :].tolist())
    tiers = (0,) if mode == "none" else (0, 3)
    with speccompile.wrap(model, mode, tiers=tiers, max_batch=3, max_len=96, backend=backend, **options) as spec:
        for tier in tiers:
            spec.set_tier(tier)
            requests = [spec.engine.submit(prompt, max_new_tokens=40, eos_token_id=[]) for prompt in prompts]
            assert [request.result().token_ids for request in requests] == wanted
    # And that is what the CPU says too.
    assert greedy(tiny_llama(), prompts[0], 40) == wanted[0]


@pytest.mark.parametrize("backend", ["eager", "inductor", "auto"])
def test_the_text_by_trees(backend: str) -> None:
    model = tiny_llama().cuda()
    prompts = [random_prompt(9, seed=1), random_prompt(30, seed=2), [5, 6, 7] * 6]
    tree = Tree.dynamic(5, 3, 2)
    options: dict[str, Any] = {"tiers": (0, 3, tree), "max_batch": 3, "max_len": 96, "backend": backend}
    with speccompile.wrap(model, "draft_target", draft=random_drafter().cuda(), **options) as spec:
        for tier in (0, 3, tree):
            spec.set_tier(tier)
            requests = [spec.engine.submit(prompt, max_new_tokens=40, eos_token_id=[]) for prompt in prompts]
            texts = [request.result().token_ids for request in requests]
            assert texts == [greedy(tiny_llama(), prompt, 40) for prompt in prompts]


def test_drawn_text_does_not_depend_on_the_tier() -> None:
    model = tiny_llama().cuda()
    ids = torch.tensor([[5, 6, 7, 8] * 4], device="cuda")
    texts = []
    with speccompile.wrap(model, "ngram", tiers=(0, 3, 7), max_batch=2, max_len=96) as spec:
        for tier in (0, 3, 7):
            spec.set_tier(tier)
            texts.append(spec.generate(ids, max_new_tokens=40, do_sample=True, temperature=0.9, top_k=30, seed=11))
    assert torch.equal(texts[0], texts[1]) and torch.equal(texts[0], texts[2])

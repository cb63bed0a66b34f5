"""Multi-head latent attention over what it caches, as devices with the trait run it: here on a CPU."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import speccompile
from speccompile import Tree
from speccompile.graph.layer_state import KVShape
from speccompile.graph_capture.latent import cached_latents, expansion
from speccompile.graph_capture.model_info import inspect_model
from speccompile.graph_capture.observe import observe
from speccompile.utils.devices import TRAITS
from support.families import SIZES, assert_texts, greedy, model_of, speculative

TREE = Tree.dynamic(nodes=5, depth=3, branches=2)
PROMPTS = [random.Random(seed).sample(range(5, 100), 9) * 2 for seed in range(3)]


@pytest.fixture
def trait(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    # Stored captures are those of the device's usual traits.
    monkeypatch.setattr("speccompile.utils.storage.cache_dir", lambda: tmp_path)
    monkeypatch.setitem(TRAITS, "cpu", replace(TRAITS["cpu"], replaces_attention=True))


def test_without_the_trait_a_model_keeps_its_own_attention() -> None:
    model = model_of("deepseek_v3")
    assert observe(model, inspect_model(model)).route == "eager"


def test_attention_over_latents_is_that_over_expanded_keys() -> None:
    attention = model_of("deepseek_v3").model.layers[0].self_attn
    rank, rotary = attention.kv_lora_rank, attention.qk_rope_head_dim
    latents, own = torch.randn(2, 1, 5, rank), torch.randn(2, 1, 5, rotary)
    keys, values = cached_latents(latents, own)
    of_keys, of_values = expansion(attention, rank, keys.half(), keys.dtype)
    for expanded, ours in zip(attention.expand_kv(latents, own), (keys @ of_keys, values @ of_values), strict=True):
        torch.testing.assert_close(ours, expanded)


@pytest.mark.parametrize("form", ["bfloat16", "float16"])
def test_latents_are_rounded(trait: None, form: Any) -> None:
    with speccompile.wrap(model_of("deepseek_v3"), "ngram", tiers=(0, 3), kv=form, **SIZES) as spec:  # type: ignore[arg-type]
        assert spec.route == "attention" and spec.engine.arena["k_0"].dtype is getattr(torch, form)
        assert spec.check(PROMPTS, max_new_tokens=20)


@pytest.mark.parametrize("name", ["deepseek_v3", "longcat_flash"])
def test_texts_are_those_of_the_model(trait: None, name: str) -> None:
    model = model_of(name)
    with speccompile.wrap(model, "ngram", tiers=(0, 3, TREE), policy="fixed:3", **SIZES) as spec:
        assert spec._build is not None and spec._build.observed.route == "attention"
        config = model.config
        kept = KVShape((1, config.kv_lora_rank + config.qk_rope_head_dim), (1, config.kv_lora_rank), model.dtype)
        assert set(spec._build.observed.kv.values()) == {kept}
        wanted = [greedy(model, prompt) for prompt in PROMPTS]
        for tier in (0, 3, TREE):
            spec.set_tier(tier)
            assert speculative(spec, PROMPTS) == wanted


def test_steps_follow_an_expansion_that_changes_in_place(trait: None) -> None:
    model = model_of("deepseek_v3")
    with speccompile.wrap(model, "ngram", tiers=(0, 3), policy="fixed:3", **SIZES) as spec:
        assert_texts(spec, model, PROMPTS)
        with torch.no_grad():
            model.model.layers[0].self_attn.kv_b_proj.weight.mul_(-2.0)
        assert_texts(spec, model, PROMPTS)

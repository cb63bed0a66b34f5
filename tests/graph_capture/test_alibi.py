"""ALiBi by the attention op, as devices with the trait run it: here on a CPU."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers.models.bloom.modeling_bloom import build_alibi_tensor
from transformers.models.mpt.modeling_mpt import build_mpt_alibi_tensor

import speccompile
from speccompile import Tree
from speccompile.graph_capture.model_info import inspect_model
from speccompile.graph_capture.observe import observe
from speccompile.ops.attention import alibi_slopes
from speccompile.utils.devices import TRAITS
from support.families import SIZES, greedy, model_of, speculative

TREE = Tree.dynamic(nodes=5, depth=3, branches=2)
PROMPTS = [random.Random(seed).sample(range(5, 100), 9) * 2 for seed in range(3)]


@pytest.fixture
def trait(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    # Stored captures are those of the device's usual traits. The C++ kernel of attention does not have ALiBi.
    monkeypatch.setattr("speccompile.utils.storage.cache_dir", lambda: tmp_path)
    monkeypatch.setitem(TRAITS, "cpu", replace(TRAITS["cpu"], replaces_attention=True, cpp_ops=False))


@pytest.mark.parametrize("name", ["bloom", "mpt"])
def test_without_the_trait_a_model_keeps_its_own_attention(name: str) -> None:
    model = model_of(name)
    assert observe(model, inspect_model(model)).route == "eager"


@pytest.mark.parametrize("heads", [1, 2, 3, 8, 14, 16, 71, 112])
def test_slopes_are_those_of_transformers(heads: int) -> None:
    slopes = alibi_slopes(heads, torch.device("cpu"))
    torch.testing.assert_close(slopes, build_alibi_tensor(torch.ones(1, 2), heads, torch.float32)[:, 0, 1])
    torch.testing.assert_close(slopes, -build_mpt_alibi_tensor(heads, 2)[:, 0, 0])


@pytest.mark.parametrize("name", ["bloom", "mpt"])
def test_texts_are_those_of_the_model(trait: None, name: str) -> None:
    model = model_of(name)
    with speccompile.wrap(model, "ngram", tiers=(0, 3, TREE), policy="fixed:3", **SIZES) as spec:
        assert spec._build is not None and spec._build.observed.route == "attention"
        wanted = [greedy(model, prompt) for prompt in PROMPTS]
        for tier in (0, 3, TREE):
            spec.set_tier(tier)
            assert speculative(spec, PROMPTS) == wanted
    assert not any("forward" in vars(layer) for layer in model.modules())

"""Sparse attention by an index: its keys are state that follows the text, and the best are chosen inside a step."""

from __future__ import annotations

import json
import re

import pytest
import torch
import transformers.models.deepseek_v32.modeling_deepseek_v32 as deepseek
from transformers import PreTrainedModel

import speccompile
from speccompile.errors import InvalidHead
from speccompile.graph_capture.key_index import _smallest, symbolic_counts
from speccompile.graph_capture.model_info import inspect_model
from speccompile.graph_capture.observe import observe
from speccompile.graph_capture.store import _observation, _read_observation
from speccompile.heads import MtpHead
from support.dice import Dice
from support.errors import raises
from support.families import model_of, periodic
from support.tiny import greedy

NEW = 20


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return model_of("deepseek_v32")


def test_what_was_observed_is_stored(model: PreTrainedModel) -> None:
    observed = observe(model, inspect_model(model))
    assert observed.route == "eager" and set(observed.index) == set(observed.kv) == {0, 1}
    assert _read_observation(json.loads(json.dumps(_observation(observed)))) == observed


@pytest.mark.parametrize("chosen", [8, 500])
def test_the_keys_of_known_text_are_reused_however_many_are_chosen(chosen: int) -> None:
    """Also more than the cache has places."""
    model = model_of("deepseek_v32", index_topk=chosen)
    tiers, prompt = (0, 3), periodic(seed=2)[:25]
    with speccompile.wrap(
        model, "ngram", tiers=tiers, max_batch=2, max_len=95, backend="eager", policy=Dice(tiers)
    ) as spec:
        assert spec.arena["index_key_0"].shape[1:] == (95 + 4, model.config.index_head_dim)
        assert spec.arena.layout.tensors["index_key_0"].follows_text
        for _ in range(2):
            request = spec.engine.submit(prompt, max_new_tokens=NEW)
            spec.engine.run()
            assert request.new_tokens == greedy(model, prompt, NEW)
            prompt = [*prompt, *request.new_tokens, 7]
        assert request.stats.reused_tokens == len(prompt) - NEW - 3
        assert spec.stats.draft_tokens > 0


def test_the_least_of_a_symbolic_size_is_symbolic_inside_alone(model: PreTrainedModel) -> None:
    with pytest.raises(ZeroDivisionError), symbolic_counts(model):
        assert deepseek.__dict__["min"] is _smallest
        1 / 0  # noqa: B018
    assert "min" not in deepseek.__dict__
    assert _smallest(3, 2) == _smallest([2, 5]) == 2 and _smallest("b", "ab", key=len) == "b"

    class Least(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.topk(_smallest(4, x.shape[0])).values

    program = torch.export.export(
        Least(), (torch.arange(6.0),), dynamic_shapes=({0: torch.export.Dim.DYNAMIC},), strict=False
    )
    for count in (2, 9):
        assert program.module()(torch.arange(float(count))).shape == (min(4, count),)


def test_layers_share_what_the_index_of_one_chose() -> None:
    """Layers with an index and layers without one alternate, as in GLM-5.2."""
    types = ("full", "shared", "full")
    model = model_of("glm_moe_dsa", num_layers=len(types), indexer_types=list(types))
    own = {f"index_key_{layer}" for layer, kind in enumerate(types) if kind == "full"}
    tiers, prompts = (0, 3), [periodic(seed=2)[:25], [9, 8, 7]]
    with speccompile.wrap(
        model, "ngram", tiers=tiers, max_batch=1, max_len=63, backend="eager", policy=Dice(tiers)
    ) as spec:
        assert {name for name in spec.arena if name.startswith("index_")} == own
        for prompt in prompts:
            request = spec.engine.submit(prompt, max_new_tokens=NEW)
            spec.engine.run()
            assert request.new_tokens == greedy(model, prompt, NEW)


def test_a_module_whose_layer_has_an_index_is_refused(model: PreTrainedModel) -> None:
    with raises(
        InvalidHead, reason=re.compile("chooses the keys to attend to by an index, which only a target's layers")
    ):
        speccompile.wrap(
            model, "mtp", draft=MtpHead.random(model), tiers=(0, 1), max_batch=1, max_len=64, backend="eager"
        )

"""A change of the model after ``wrap`` that would change its text is an error at the next request."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from transformers import LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaMLP

import speccompile
from speccompile import Speculator
from speccompile.errors import ModelChanged, ModelInTraining, WeightsReplaced
from speccompile.graph_capture.altering import altering
from speccompile.graph_capture.guards import ModelGuard
from speccompile.graph_capture.model_facts import own_code, scalar_settings
from speccompile.graph_capture.model_info import inspect_model
from speccompile.graph_capture.store import CaptureStore
from speccompile.utils.storage import CacheFolder
from support.errors import raises
from support.families import model_of
from support.tiny import greedy, tiny_llama
from support.watched_models import NEW, PROMPT, steer, text, wrapped

Undo = Callable[[], object]
Change = Callable[[LlamaForCausalLM], Undo]


def look(module: nn.Module, inputs: Any) -> None:
    """A hook that changes nothing: what it does cannot be known."""


def assigned(owner: Callable[[LlamaForCausalLM], Any], name: str, value: Any) -> Change:
    def change(model: LlamaForCausalLM) -> Undo:
        target = owner(model)
        known, before = name in vars(target), getattr(target, name)
        if isinstance(target, nn.Module) and name in target._modules:
            known = True
        setattr(target, name, value)
        return lambda: setattr(target, name, before) if known else delattr(target, name)

    return change


def without_a_layer(model: LlamaForCausalLM) -> Undo:
    layers = list(model.model.layers)
    del model.model.layers[1]
    return lambda: model.model.layers.append(layers[1])


def with_a_module(model: LlamaForCausalLM) -> Undo:
    model.model.layers[0].mlp.add_module("probe", nn.Identity())
    return lambda: delattr(model.model.layers[0].mlp, "probe")


def with_a_layer_in_training(model: LlamaForCausalLM) -> Undo:
    model.model.layers[0].self_attn.train()
    return lambda: model.model.layers[0].self_attn.eval()


def with_another_attention(model: LlamaForCausalLM) -> Undo:
    before = model.config._attn_implementation
    model.set_attn_implementation("eager")
    return lambda: model.set_attn_implementation(before)


def with_a_bias(model: LlamaForCausalLM) -> Undo:
    up = model.model.layers[0].mlp.up_proj
    up.bias = nn.Parameter(torch.ones(up.out_features))
    return lambda: setattr(up, "bias", None)


CHANGES: dict[str, tuple[Change, str]] = {
    "a forward hook": (
        lambda model: model.model.layers[1].register_forward_hook(steer).remove,
        r"a forward hook of model\.layers\.1 was added \(steer\)",
    ),
    "a forward pre-hook": (
        lambda model: model.lm_head.register_forward_pre_hook(look).remove,
        r"a forward pre-hook of lm_head was added \(look\)",
    ),
    "a global hook": (lambda _: register_module_forward_hook(steer).remove, "a forward hook of every module was added"),
    "a global pre-hook": (
        lambda _: register_module_forward_pre_hook(look).remove,
        "a forward pre-hook of every module was added",
    ),
    "a replaced module": (
        assigned(lambda model: model.model.layers[0].mlp, "act_fn", nn.ReLU()),
        r"the module model\.layers\.0\.mlp\.act_fn \(SiLU\w*\) was replaced by another ReLU",
    ),
    "a removed layer": (without_a_layer, r"the module model\.layers\.1 \(LlamaDecoderLayer\) was removed"),
    "an added module": (with_a_module, r"the module model\.layers\.0\.mlp\.probe \(Identity\) was added"),
    "a patched forward": (
        assigned(lambda model: model.model.layers[0].mlp, "forward", lambda hidden: hidden),
        r"model\.layers\.0\.mlp\.forward was replaced by the function",
    ),
    "a patched class": (
        assigned(lambda _: LlamaMLP, "forward", lambda self, hidden: hidden),
        r"LlamaMLP\.forward, which model\.layers\.0\.mlp runs, was replaced",
    ),
    "a setting of a module": (
        assigned(lambda model: model.model.layers[1].self_attn, "scaling", 1.0),
        r"model\.layers\.1\.self_attn\.scaling was 0\.25 and is 1\.0",
    ),
    "a setting of the config": (
        assigned(lambda model: model.config, "num_hidden_layers", 1),
        r"config\.num_hidden_layers was 2 and is 1",
    ),
    "another attention": (with_another_attention, r"config\._attn_implementation was 'sdpa' and is 'eager'"),
    "a layer in training": (
        with_a_layer_in_training,
        r"model\.layers\.0\.self_attn\.training was False and is True",
    ),
    "a bias where there was none": (with_a_bias, r"the tensor model\.layers\.0\.mlp\.up_proj\.bias was added"),
}


@pytest.fixture(scope="module")
def spec(model: LlamaForCausalLM) -> Iterator[Speculator]:
    with wrapped(model) as spec:
        yield spec


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_of_the_model_is_refused_by_name_until_it_is_undone(
    spec: Speculator, model: LlamaForCausalLM, name: str
) -> None:
    before = text(spec)
    change, message = CHANGES[name]
    undo = change(model)
    try:
        with raises(ModelChanged, what=re.compile(message)):
            text(spec)
        with raises(ModelChanged, what=re.compile(message)):
            spec.engine.submit(PROMPT)
    finally:
        undo()
    assert text(spec) == before == greedy(model, PROMPT, NEW)


def test_what_transformers_notes_on_a_model_is_no_change(
    spec: Speculator, model: LlamaForCausalLM, tmp_path: Path
) -> None:
    ids = torch.tensor([PROMPT])
    # Both leave marks: hooks that record hidden states, and attributes.
    model(ids, output_hidden_states=True)
    model.generate(ids, max_new_tokens=4, do_sample=False)
    model.save_pretrained(tmp_path)
    model.train()
    model.eval()
    model.config.pad_token_id = 0
    model.config.use_cache = False
    model.generate = spec.generate
    try:
        assert text(spec)
        assert own_code(model) is None
    finally:
        del model.generate
        model.config.pad_token_id, model.config.use_cache = None, True


def test_a_table_that_a_longer_text_lets_the_model_grow_is_no_change() -> None:
    model = model_of("xglm")
    with speccompile.wrap(model, tiers=(0,), max_len=32, backend="eager") as spec:
        before = text(spec)
        positions = model.model.embed_positions
        table = positions.weights
        model(torch.zeros(1, len(table) + 3, dtype=torch.int64))
        assert len(positions.weights) > len(table)
        assert text(spec) == before
        positions.weights[7] += 1
        with raises(WeightsReplaced, path="model.embed_positions.weights"):
            text(spec)
        positions.weights = table
        assert text(spec) == before


def test_changes_of_our_own_are_none(model: LlamaForCausalLM) -> None:
    guard = ModelGuard(model)
    with altering(model):
        handle = model.lm_head.register_forward_hook(steer)
        guard.check()
    with pytest.raises(ModelChanged):
        guard.check()
    handle.remove()
    assert guard.unchanged()


def test_a_setting_that_became_a_tensor_is_a_memory_of_the_forward() -> None:
    model = tiny_llama()
    model.model.rope_deltas = None
    guard = ModelGuard(model)
    model.model.rope_deltas = torch.zeros(3)
    guard.check()


def test_a_capture_with_hooks_is_never_stored(model: LlamaForCausalLM) -> None:
    wrapped(model).close()
    assert CaptureStore(model, inspect_model(model), CacheFolder()).load() is not None
    handle = model.lm_head.register_forward_hook(steer)
    try:
        assert own_code(model) == "a forward hook of lm_head (steer)"
        assert CaptureStore(model, inspect_model(model), CacheFolder()).load() is None
    finally:
        handle.remove()
    assert own_code(model) is None


def test_a_capture_is_stored_by_the_settings_of_its_modules(model: LlamaForCausalLM) -> None:
    def name() -> str:
        return CaptureStore(model, inspect_model(model), CacheFolder()).name

    before, attention = name(), model.model.layers[0].self_attn
    attention.scaling *= 1.001
    try:
        assert name() != before
    finally:
        attention.scaling /= 1.001
    model.name_or_path = "elsewhere"
    assert name() == before
    assert "model.layers.0.self_attn.layer_idx=0" in set(scalar_settings(model))


def test_dropout_of_a_module_that_was_added_later_is_refused() -> None:
    model = tiny_llama()
    model.model.layers[0].mlp.down_proj = nn.Sequential(model.model.layers[0].mlp.down_proj, nn.Dropout(0.1))
    with raises(ModelInTraining, model="LlamaForCausalLM"):
        wrapped(model)

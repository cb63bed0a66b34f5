"""What changes a model's text after ``wrap``, other than weights, is an error at the next request, or a new build."""

from __future__ import annotations

import gc
import re
import weakref
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
from speccompile.errors import CannotSave, ModelChanged, ModelInTraining, WeightsReplaced
from speccompile.graph_capture.altering import altering
from speccompile.graph_capture.guards import ModelGuard
from speccompile.graph_capture.model_facts import own_code, scalar_settings
from speccompile.graph_capture.model_info import inspect_model
from speccompile.graph_capture.store import CaptureStore
from speccompile.utils.storage import CacheFolder
from support.errors import raises
from support.families import model_of
from support.tiny import greedy, tiny_llama

PROMPT = [3, 1, 4, 1, 5]
NEW = 8

Undo = Callable[[], object]
Change = Callable[[LlamaForCausalLM], Undo]


def steer(module: nn.Module, inputs: Any, output: Any) -> Any:
    """A steering vector, as probes and control vectors add one."""
    return output + 0.5 if isinstance(output, torch.Tensor) else (output[0] + 0.5, *output[1:])


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
def model() -> LlamaForCausalLM:
    return tiny_llama()


def wrapped(model: LlamaForCausalLM) -> Speculator:
    return speccompile.wrap(model, "ngram", tiers=(0, 3), max_len=64, backend="eager")


@pytest.fixture(scope="module")
def spec(model: LlamaForCausalLM) -> Iterator[Speculator]:
    with wrapped(model) as spec:
        yield spec


def text(spec: Speculator) -> list[int]:
    ids = torch.tensor([PROMPT])
    return spec.generate(ids, max_new_tokens=NEW)[0, len(PROMPT) :].tolist()


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


class Steer:
    """A steering vector that can be switched off."""

    def __init__(self) -> None:
        self.vector, self.scale, self.layers = torch.linspace(-1, 1, 64), 1.0, [0]

    def __call__(self, module: nn.Module, inputs: Any, output: torch.Tensor) -> torch.Tensor:
        return output + self.scale * self.vector

    def method(self, module: nn.Module, inputs: Any, output: torch.Tensor) -> torch.Tensor:
        return self(module, inputs, output)


def closing_over(steer: Steer) -> Callable[..., Any]:
    vector, scale = steer.vector, 1.0

    def hook(module: nn.Module, inputs: Any, output: torch.Tensor) -> torch.Tensor:
        return output + scale * vector

    def switch(value: float) -> None:
        nonlocal scale
        scale = value

    steer.switch = switch  # type: ignore[attr-defined]
    return hook


def set_scale(steer: Steer) -> None:
    steer.scale = 0.0


def append_a_layer(steer: Steer) -> None:
    steer.layers.append(1)


HOOKS: dict[str, tuple[Callable[[Steer], Any], Callable[[Steer], object], str]] = {
    "an object": (lambda steer: steer, set_scale, r"Steer\.scale was 1\.0 and is 0\.0, in a forward hook of model\."),
    "an object's list": (lambda steer: steer, append_a_layer, r"Steer\.layers was \[0\] and is \[0, 1\], in a forward"),
    "a method": (
        lambda steer: steer.method,
        set_scale,
        r"Steer\.method\.scale was 1\.0 and is 0\.0, in a forward hook",
    ),
    "a closure": (
        closing_over,
        lambda steer: steer.switch(0.0),  # type: ignore[attr-defined]
        r"hook\.scale was 1\.0 and is 0\.0, in a forward hook",
    ),
}


@pytest.mark.parametrize("name", HOOKS)
def test_values_that_a_hook_holds_are_watched(model: LlamaForCausalLM, name: str) -> None:
    steer = Steer()
    make, change, message = HOOKS[name]
    handle = model.model.layers[0].mlp.register_forward_hook(make(steer))
    try:
        guard = ModelGuard(model)
        assert guard.unchanged()
        change(steer)
        assert not guard.unchanged()
        with raises(ModelChanged, what=re.compile(message)):
            guard.check()
    finally:
        handle.remove()


def test_what_a_hook_records_is_no_change(model: LlamaForCausalLM) -> None:
    steer = Steer()
    steer.last, steer.all = None, []  # type: ignore[attr-defined]
    handle = model.model.layers[0].mlp.register_forward_hook(steer)
    try:
        guard = ModelGuard(model)
        steer.last, steer.all = torch.ones(3), [torch.ones(3)]  # type: ignore[attr-defined]
        guard.check()
        assert guard.unchanged()
    finally:
        handle.remove()


def test_steps_follow_tensors_of_a_hook_and_refuse_other_values_of_it() -> None:
    model, steer = tiny_llama(), Steer()
    model.model.layers[0].mlp.register_forward_hook(steer)
    with wrapped(model) as spec:
        before = text(spec)
        assert before == greedy(model, PROMPT, NEW)
        steer.vector.mul_(20)
        assert text(spec) == greedy(model, PROMPT, NEW) != before
        steer.scale = 0.0
        with raises(ModelChanged, what=re.compile(r"Steer\.scale was 1\.0 and is 0\.0")):
            text(spec)
        spec.rebuild()
        assert text(spec) == greedy(model, PROMPT, NEW) != before


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


def test_replaced_weights_are_a_change(spec: Speculator, model: LlamaForCausalLM) -> None:
    weight = model.model.norm.weight
    model.model.norm.weight = nn.Parameter(weight.detach().clone())
    try:
        with raises(WeightsReplaced, path="model.norm.weight"):
            text(spec)
    finally:
        model.model.norm.weight = weight
    assert issubclass(WeightsReplaced, ModelChanged)
    assert text(spec)


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


def test_rebuild_follows_the_model_as_it_is_now(model: LlamaForCausalLM) -> None:
    with wrapped(model) as spec:
        plain = text(spec)
        handle = model.model.layers[0].register_forward_hook(steer)
        try:
            with pytest.raises(ModelChanged):
                text(spec)
            spec.rebuild()
            steered = greedy(model, PROMPT, NEW)
            assert text(spec) == steered != plain
            assert spec.check([PROMPT], max_new_tokens=NEW)
            with raises(CannotSave, reason=re.compile(r"a forward hook of model\.layers\.0 \(steer\)")):
                spec.save("never.spec")
        finally:
            handle.remove()
        with raises(ModelChanged, what=re.compile(r"a forward hook of model\.layers\.0 was removed")):
            text(spec)
        spec.rebuild()
        assert text(spec) == plain


def test_a_rebuild_that_is_refused_leaves_the_speculator_as_it_was(spec: Speculator, model: LlamaForCausalLM) -> None:
    before = text(spec)
    model.train()
    try:
        with pytest.raises(ModelInTraining):
            spec.rebuild()
    finally:
        model.eval()
    assert text(spec) == before


def test_a_capture_with_hooks_is_never_stored(model: LlamaForCausalLM) -> None:
    store = CaptureStore(model, inspect_model(model), CacheFolder())
    assert store.load() is not None
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


def test_a_closed_speculator_keeps_no_model() -> None:
    model = tiny_llama()
    spec, kept = wrapped(model), weakref.ref(model)
    spec.close()
    del model
    gc.collect()
    assert kept() is None

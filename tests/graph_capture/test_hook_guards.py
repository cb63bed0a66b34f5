"""Values that a hook holds are parts of the model: steps follow its tensors, and refuse other values."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from transformers import LlamaForCausalLM

from speccompile.errors import ModelChanged
from speccompile.graph_capture.guards import ModelGuard
from support.errors import raises
from support.tiny import greedy, tiny_llama
from support.watched_models import NEW, PROMPT, text, wrapped


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

"""Tensors that modules and hooks hold besides weights: steps follow a change in place, and refuse another tensor."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from transformers import LlamaForCausalLM

from speccompile import Speculator
from speccompile.errors import ModelChanged
from speccompile.graph_capture.held_tensors import HeldTensors, held_by_modules
from support.errors import raises
from support.tiny import greedy, tiny_llama
from support.watched_models import NEW, PROMPT, text, wrapped


class Vector:
    """An object that holds a tensor and is not a module."""

    def __init__(self, vector: torch.Tensor) -> None:
        self.vector = vector

    def __call__(self, module: nn.Module, inputs: Any, output: torch.Tensor) -> torch.Tensor:
        return output + self.vector


class Steered(nn.Module):
    """An MLP that adds what it holds."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.plain, self.by_name, self.object = ones(), {"a": [ones()]}, Vector(ones())

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        held: torch.Tensor = self.plain + self.by_name["a"][0] + self.object.vector
        return self.inner(hidden) + held


def ones() -> torch.Tensor:
    return torch.linspace(-0.1, 0.1, 64)


def other() -> torch.Tensor:
    return torch.linspace(3, -3, 64)


def steered_model() -> tuple[LlamaForCausalLM, Steered]:
    model = tiny_llama()
    steered = Steered(model.model.layers[0].mlp)
    model.model.layers[0].mlp = steered
    return model, steered


def replace_plain(steered: Steered, hooks: Hooks) -> None:
    steered.plain = other()


def replace_data(steered: Steered, hooks: Hooks) -> None:
    steered.plain.data = other()


def replace_in_container(steered: Steered, hooks: Hooks) -> None:
    steered.by_name["a"][0] = other()


def replace_container(steered: Steered, hooks: Hooks) -> None:
    steered.by_name = {"a": [other()]}


def replace_in_object(steered: Steered, hooks: Hooks) -> None:
    steered.object.vector = other()


def delete(steered: Steered, hooks: Hooks) -> None:
    del steered.plain


def replace_in_hook(steered: Steered, hooks: Hooks) -> None:
    hooks.object.vector = other()


def replace_in_closure(steered: Steered, hooks: Hooks) -> None:
    hooks.replace(other())


def replace_in_keywords(steered: Steered, hooks: Hooks) -> None:
    hooks.partial.keywords["vector"] = other()


class Hooks:
    """One of each kind."""

    def __init__(self) -> None:
        self.object = Vector(ones())
        vector = ones()

        def hook(module: nn.Module, inputs: Any, output: torch.Tensor) -> torch.Tensor:
            return output + vector

        def replace(value: torch.Tensor) -> None:
            nonlocal vector
            vector = value

        self.closure, self.replace = hook, replace
        self.partial = functools.partial(added, vector=ones())

    def register(self, module: nn.Module) -> None:
        for hook in (self.object, self.closure, self.partial):
            module.register_forward_hook(hook)


def added(module: nn.Module, inputs: Any, output: torch.Tensor, vector: torch.Tensor) -> torch.Tensor:
    return output + vector


MLP = r"model\.layers\.0\.mlp"
REPLACED = "was replaced by another tensor"
CHANGES: dict[str, tuple[Callable[[Steered, Hooks], None], str]] = {
    "an attribute": (replace_plain, rf"the tensor {MLP}\.plain {REPLACED}"),
    "an attribute's data": (replace_data, rf"the tensor {MLP}\.plain {REPLACED}"),
    "an attribute that was deleted": (delete, rf"the tensor {MLP}\.plain was removed"),
    "an item": (replace_in_container, rf"the tensor {MLP}\.by_name\['a'\]\[0\] {REPLACED}"),
    "a container": (replace_container, rf"the tensor {MLP}\.by_name\['a'\]\[0\] {REPLACED}"),
    "an attribute of an object": (replace_in_object, rf"the tensor {MLP}\.object\.vector {REPLACED}"),
    "an attribute of a hook": (replace_in_hook, rf"the tensor Vector\.vector {REPLACED}"),
    "what a hook closes over": (replace_in_closure, rf"the tensor Hooks\.__init__\.<locals>\.hook\.vector {REPLACED}"),
    "what a hook was made with": (replace_in_keywords, rf"the tensor partial\.keywords\['vector'\] {REPLACED}"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_another_tensor_in_the_same_place_is_refused_by_name(name: str) -> None:
    model, steered = steered_model()
    hooks = Hooks()
    closure = hooks.closure.__closure__
    assert closure is not None
    read = [
        *(steered.plain, steered.by_name["a"][0], steered.object.vector),
        *(hooks.object.vector, closure[0].cell_contents, hooks.partial.keywords["vector"]),
    ]
    named = {"Vector": hooks.object, "Hooks.__init__.<locals>.hook": hooks.closure, "partial": hooks.partial}
    held = HeldTensors(model, [tensor.detach() for tensor in read], named.items())
    held.check()
    change, message = CHANGES[name]
    change(steered, hooks)
    with raises(ModelChanged, what=re.compile(message)):
        held.check()


def test_what_no_step_reads_may_be_replaced() -> None:
    """A memory of the forward, say."""
    model, steered = steered_model()
    steered.last = torch.ones(3)
    held = HeldTensors(model, [steered.plain], ())
    steered.last, steered.object.vector = torch.zeros(4), other()
    held.check()


def test_a_tensor_of_the_same_values_is_no_change_while_they_stay_the_same() -> None:
    """A forward may build its table anew."""
    model, steered = steered_model()
    held = HeldTensors(model, [steered.plain], ())
    steered.plain = ones()
    held.check()
    steered.plain[0] += 1
    with pytest.raises(ModelChanged):
        held.check()


def test_objects_that_lead_out_of_the_model_are_not_followed(followed: tuple[Any, Any, Speculator]) -> None:
    model, steered, spec = followed
    steered.speculator = spec
    try:
        assert set(held_by_modules(model)) == {
            f"model.layers.0.mlp.{name}" for name in ("plain", "by_name['a'][0]", "object.vector")
        }
    finally:
        del steered.speculator


# Built for each test: the changes of one would change the sequence of the next.
@pytest.fixture
def followed() -> Iterator[tuple[LlamaForCausalLM, Steered, Speculator]]:
    """A steered model, and its speculator from a stored capture."""
    model, steered = steered_model()
    wrapped(model).close()
    with wrapped(model) as spec:
        assert spec.stages["capture"].note == "read from the store"
        yield model, steered, spec


def test_steps_follow_a_change_in_place_and_keep_no_kv_from_before(
    followed: tuple[LlamaForCausalLM, Steered, Speculator],
) -> None:
    model, steered, spec = followed
    texts = [text(spec)]
    assert texts[0] == greedy(model, PROMPT, NEW)
    for change in (
        lambda: steered.plain.mul_(40),
        lambda: steered.by_name["a"][0].data.mul_(-60),
        lambda: steered.object.vector.copy_(other()),
    ):
        change()
        texts.append(text(spec))
        assert texts[-1] == greedy(model, PROMPT, NEW) != texts[-2]


def test_a_replaced_tensor_is_refused_until_the_steps_are_built_anew(
    followed: tuple[LlamaForCausalLM, Steered, Speculator],
) -> None:
    model, steered, spec = followed
    before, plain = text(spec), steered.plain
    steered.plain = -5 * plain
    with raises(ModelChanged, what=re.compile(rf"{MLP}\.plain {REPLACED}")):
        text(spec)
    steered.plain = plain
    assert text(spec) == before
    steered.plain = -5 * plain
    spec.rebuild()
    assert text(spec) == greedy(model, PROMPT, NEW) != before


def test_a_hook_that_counts_its_calls_is_refused_with_what_to_do() -> None:
    class Counter:
        calls = 0

        def __call__(self, module: nn.Module, inputs: Any, output: Any) -> None:
            self.calls += 1

    class Apart(Counter):
        def __init__(self) -> None:
            self.seen = Counter()

        def __call__(self, module: nn.Module, inputs: Any, output: Any) -> None:
            self.seen.calls += 1

    model = tiny_llama()
    handle = model.lm_head.register_forward_hook(Counter())
    with wrapped(model) as spec:
        text(spec)
        greedy(model, PROMPT, 2)
        counted = re.compile(r"Counter\.calls was \d+ and is \d+, in .* lm_head \(.*separate object")
        with raises(ModelChanged, what=counted):
            text(spec)
        handle.remove()
        model.lm_head.register_forward_hook(Apart())
        spec.rebuild()
        before = text(spec)
        assert spec.check([PROMPT], max_new_tokens=NEW)
        assert text(spec) == before == greedy(model, PROMPT, NEW)

"""A backend of the user's own: one class, made known from outside."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch

import speccompile
from speccompile.backends import Eager
from speccompile.errors import BackendFailed, InvalidOption, UnknownBackend
from speccompile.graph.step_graph import StepGraph
from speccompile.lowering import backends
from support.errors import raises
from support.tiny import tiny_llama

OPTIONS: dict[str, Any] = {"tiers": (0, 2), "max_len": 48}


@dataclass(frozen=True)
class Counting(Eager):
    """Counts the runs of each executable."""

    runs: ClassVar[dict[str, int]] = {}

    def load(self, source: str, graph: StepGraph, title: str) -> Callable[..., Any]:
        step = super().load(source, graph, title)

        def counted(*tensors: torch.Tensor) -> Any:
            self.runs[title] = self.runs.get(title, 0) + 1
            return step(*tensors)

        return counted


class Elsewhere(Eager):
    devices = ("tpu",)


@dataclass(frozen=True)
class Raising(Eager):
    """Lowers the model, and no tier."""

    def load(self, source: str, graph: StepGraph, title: str) -> Callable[..., Any]:
        if title.startswith("tier"):
            raise ArithmeticError("no code today")
        return super().load(source, graph, title)


class Demanding(Eager):
    def __init__(self, address: str) -> None:
        super().__init__(address)


@pytest.fixture(autouse=True)
def registry(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other tests' backends stay."""
    monkeypatch.setattr(backends, "_own", dict(backends._own))


def test_a_registered_backend_lowers_all_steps() -> None:
    speccompile.register_backend("counting", Counting)
    model, prompt = tiny_llama(), torch.tensor([[1, 2, 3, 4, 5]])
    with speccompile.wrap(model, "ngram", backend="counting", **OPTIONS) as spec:
        text = spec.generate(prompt, max_new_tokens=12)
        assert torch.equal(text, model.generate(prompt, max_new_tokens=12, do_sample=False))
        assert "backend 'counting'" in repr(spec)
        steps = sum(count for title, count in Counting.runs.items() if title.startswith(("tier", "mixed")))
        assert steps >= spec.stats.steps > 0


def test_a_backend_for_other_devices_is_refused() -> None:
    speccompile.register_backend("elsewhere", Elsewhere)
    with raises(InvalidOption, where="wrap", name="backend", value="elsewhere", reason=re.compile("tpu")):
        speccompile.wrap(tiny_llama(), backend="elsewhere", **OPTIONS)


@pytest.mark.parametrize(
    ("name", "backend"),
    [("eager", Counting), ("auto", Counting), ("", Counting), (3, Counting), ("own", Counting("x")), ("own", dict)],
)
def test_a_wrong_name_or_class_is_refused(name: Any, backend: Any) -> None:
    with raises(InvalidOption, where="register_backend"):
        speccompile.register_backend(name, backend)


def test_what_a_backend_raises_names_it_and_the_step() -> None:
    speccompile.register_backend("raising", Raising)
    step, reason = re.compile("^lower tier"), "ArithmeticError: no code today"
    with raises(BackendFailed, name="raising", what=step, reason=reason):
        speccompile.wrap(tiny_llama(), backend="raising", **OPTIONS)


def fails(*arguments: Any) -> Any:
    raise ArithmeticError("no code today")


@pytest.mark.parametrize(
    ("methods", "what"),
    [
        ({"choose_kernels": fails}, "choose kernels"),
        ({"choose_kernels": lambda *_: None}, "choose kernels"),
        ({"with_storage": fails}, "take a storage"),
        ({"with_storage": lambda *_: None}, "take a storage"),
        ({"prepare": fails}, "prepare"),
        ({"captures": fails}, "return what captures its steps"),
        ({"load": lambda *_: None}, "lower the captured model"),
        ({"load": lambda *_: fails}, "run the captured model"),
        ({"load": lambda *_: lambda: None}, "run the captured model"),
    ],
)
def test_each_method_that_fails_names_the_backend(methods: dict[str, Any], what: str) -> None:
    speccompile.register_backend("broken", type("Broken", (Eager,), methods))
    with raises(BackendFailed, name="broken", what=what):
        speccompile.wrap(tiny_llama(), "none", backend="broken", **{**OPTIONS, "tiers": (0,)})


@pytest.mark.parametrize("devices", [None, "cpu", (3,)])
def test_devices_are_a_tuple_of_texts(devices: Any) -> None:
    with raises(InvalidOption, where="register_backend", name="backend", reason=re.compile("devices")):
        speccompile.register_backend("own", type("Own", (Eager,), {"devices": devices}))


def test_a_constructor_that_needs_more_is_refused_when_it_is_registered() -> None:
    with raises(InvalidOption, name="backend", value=Demanding, reason=re.compile("name")):
        speccompile.register_backend("demanding", Demanding)


def test_a_name_is_taken_until_it_is_replaced() -> None:
    speccompile.register_backend("own", Counting)
    with raises(InvalidOption, name="name", value="own"):
        speccompile.register_backend("own", Elsewhere)
    speccompile.register_backend("own", Elsewhere, replace=True)
    assert backends.backends()["own"] is Elsewhere
    with raises(UnknownBackend, name="other", available=re.compile(r"\bown\b")):
        speccompile.wrap(tiny_llama(), backend="other", **OPTIONS)

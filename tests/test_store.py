"""Captures on disk: equal to what was captured, for any arena size, and never trusted blindly."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import LlamaForCausalLM

import speccompile
from speccompile import build as build_module
from speccompile.errors import CaptureMismatch
from speccompile.graph_capture.store import CaptureStore
from speccompile.graph_capture.support import inspect_model
from speccompile.passes.printing import to_python
from tests.tiny import tiny_llama


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("speccompile.graph_capture.store.cache_dir", lambda: tmp_path)
    return tmp_path


@pytest.fixture
def model() -> LlamaForCausalLM:
    return tiny_llama()


def wrap(model: LlamaForCausalLM, **options: int) -> speccompile.Speculator:
    return speccompile.wrap(model, tiers=(0, 2), backend="eager", max_len=options.pop("max_len", 64), **options)


def count_captures(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    calls: list[int] = []
    capture = build_module.capture

    def counted(*args, **kwargs):  # type: ignore[no-untyped-def]
        calls.append(1)
        return capture(*args, **kwargs)

    monkeypatch.setattr(build_module, "capture", counted)
    return calls


def test_a_stored_capture_is_the_captured_graph(model: LlamaForCausalLM) -> None:
    fresh = wrap(model).stages["capture"].graph
    stored = wrap(model).stages["capture"].graph
    assert to_python(stored) == to_python(fresh)
    assert [node.meta.get("layer") for node in stored.graph.nodes] == [
        node.meta.get("layer") for node in fresh.graph.nodes
    ]
    for name, port in fresh.ports.items():
        assert stored.ports[name] == port
        if port.value is not None:
            assert stored.ports[name].value.data_ptr() == port.value.data_ptr()  # type: ignore[union-attr]


def test_one_capture_serves_every_arena_size(model: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = count_captures(monkeypatch)
    prompt = torch.randint(1, 128, (1, 20), generator=torch.Generator().manual_seed(0))
    wanted = model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=30, do_sample=False)
    for sizes in ({"max_len": 64}, {"max_len": 200}, {"max_len": 64, "max_batch": 3}):
        assert torch.equal(wrap(model, **sizes).generate(prompt, max_new_tokens=30), wanted)
    assert len(calls) == 1


def test_another_model_is_captured_anew(model: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = count_captures(monkeypatch)
    wrap(model)
    wrap(tiny_llama(rms_norm_eps=1e-3))
    wrap(tiny_llama(hidden=96))
    assert len(calls) == 3


@pytest.mark.parametrize("damage", ["cut", "changed", "empty"])
def test_a_damaged_file_is_no_capture(model: LlamaForCausalLM, damage: str, monkeypatch: pytest.MonkeyPatch) -> None:
    wrap(model)
    path = CaptureStore(model, inspect_model(model)).path
    text = path.read_text()
    path.write_text(
        {"cut": text[: len(text) // 2], "changed": text.replace("aten.mul", "aten.add", 1), "empty": ""}[damage]
    )
    calls = count_captures(monkeypatch)
    wrap(model)
    assert calls == [1]


def test_a_stored_capture_that_is_wrong_is_replaced(model: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch) -> None:
    wrap(model)
    # What no key sees: a forward replaced on the instance, here one that scales the final norm.
    norm = model.model.norm
    forward = norm.forward
    norm.forward = lambda x: forward(x) * 1.5  # type: ignore[method-assign]
    calls = count_captures(monkeypatch)
    prompt = torch.randint(1, 128, (1, 12), generator=torch.Generator().manual_seed(0))
    wanted = model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=20, do_sample=False)
    assert torch.equal(wrap(model).generate(prompt, max_new_tokens=20), wanted)
    assert calls == [1]


def test_a_wrong_fresh_capture_is_an_error(model: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch) -> None:
    capture = build_module.capture

    def tampered(*args, **kwargs):  # type: ignore[no-untyped-def]
        graph = capture(*args, **kwargs)
        node = next(node for node in graph.graph.nodes if node.target is torch.ops.aten.cos.default)
        node.target = torch.ops.aten.sin.default
        return graph

    monkeypatch.setattr(build_module, "capture", tampered)
    with pytest.raises(CaptureMismatch):
        wrap(model)

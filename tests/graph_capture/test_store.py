"""Captures on disk: equal to what was captured, for any arena size, and never trusted blindly."""

from __future__ import annotations

import re
import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM, PreTrainedModel

import speccompile
from speccompile.compiler import attempts
from speccompile.compiler import frontend as stages_module
from speccompile.errors import CaptureMismatch, UnsupportedModel
from speccompile.graph.printing import to_python
from speccompile.graph.step_graph import StepGraph
from speccompile.graph_capture.model_info import inspect_model
from speccompile.graph_capture.store import CaptureStore
from speccompile.utils.storage import CacheFolder
from support.errors import raises
from support.families import family
from support.tiny import captured, tiny_llama


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache folder with nothing in it. Tests that are not about its content find again what others captured."""
    monkeypatch.setattr("speccompile.utils.storage.cache_dir", lambda: tmp_path)
    return tmp_path


@pytest.fixture
def model() -> LlamaForCausalLM:
    return tiny_llama(layers=1)


@dataclass
class Kept:
    """What the first wrap of a model captured, and the cache folder that has it."""

    model: LlamaForCausalLM
    graph: StepGraph
    folder: Path


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> Kept:
    """Of a model like :func:`model`."""
    folder, model = tmp_path_factory.mktemp("first"), tiny_llama(layers=1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("speccompile.utils.storage.cache_dir", lambda: folder)
        calls = count_captures(patch)
        graph = wrap(model).stages["capture"].graph
    assert calls == [1]
    return Kept(model, graph, folder)


@pytest.fixture
def kept(first: Kept, own_cache: Path) -> Kept:
    """That, in a cache folder of the test's own."""
    shutil.copytree(first.folder, own_cache, dirs_exist_ok=True)
    return first


def wrap(
    model: PreTrainedModel, tiers: tuple[int, ...] = (0,), max_len: int = 15, max_batch: int = 1
) -> speccompile.Speculator:
    mode = "ngram" if max(tiers) else "none"
    return speccompile.wrap(model, mode, tiers=tiers, backend="eager", max_len=max_len, max_batch=max_batch)


def text_of(model: PreTrainedModel) -> tuple[torch.Tensor, torch.Tensor]:
    """A prompt, and the 10 tokens that transformers puts after it."""
    prompt = torch.randint(1, 120, (1, 5), generator=torch.Generator().manual_seed(0))
    ones = torch.ones_like(prompt)
    return prompt, model.generate(prompt, attention_mask=ones, max_new_tokens=10, do_sample=False)


def count_captures(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    calls: list[int] = []
    capture = stages_module.capture

    def counted(*args, **kwargs):  # type: ignore[no-untyped-def]
        calls.append(1)
        return capture(*args, **kwargs)

    monkeypatch.setattr(stages_module, "capture", counted)
    return calls


def test_a_stored_capture_is_the_captured_graph(kept: Kept, monkeypatch: pytest.MonkeyPatch) -> None:
    calls, fresh = count_captures(monkeypatch), kept.graph
    stored = wrap(kept.model).stages["capture"].graph
    assert not calls and stored is not fresh
    assert to_python(stored) == to_python(fresh)
    assert [node.meta.get("layer") for node in stored.graph.nodes] == [
        node.meta.get("layer") for node in fresh.graph.nodes
    ]
    for name, port in fresh.ports.items():
        assert stored.ports[name] == port
        if port.value is not None:
            assert stored.ports[name].value.data_ptr() == port.value.data_ptr()  # type: ignore[union-attr]


def test_one_capture_serves_every_arena_size(
    model: LlamaForCausalLM, kept: Kept, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = count_captures(monkeypatch)
    prompt, wanted = text_of(model)
    for sizes in ({}, {"max_len": 200}, {"max_batch": 3}):
        assert torch.equal(wrap(model, (0, 2), **sizes).generate(prompt, max_new_tokens=10), wanted)
    assert not calls


def store_of(model: PreTrainedModel) -> CaptureStore:
    return CaptureStore(model, inspect_model(model), CacheFolder())


def test_another_model_has_another_capture(model: LlamaForCausalLM, kept: Kept) -> None:
    assert store_of(model).load() is not None
    for other in (tiny_llama(layers=1, rms_norm_eps=1e-3), tiny_llama(layers=1, hidden=96)):
        assert store_of(other).load() is None


def test_a_model_with_tied_weights_has_another_capture_than_one_with_the_same_configuration() -> None:
    tied, apart = tiny_llama(layers=1, tie=True), tiny_llama(layers=1, tie=True)
    apart.lm_head.weight = torch.nn.Parameter(apart.lm_head.weight.detach().clone())
    assert store_of(tied).name != store_of(apart).name


def test_a_damaged_file_is_no_capture(model: LlamaForCausalLM, kept: Kept, monkeypatch: pytest.MonkeyPatch) -> None:
    path = CacheFolder().path(store_of(model).name)
    text = path.read_text()
    for damaged in (text[: len(text) // 2], "", text.replace("aten.mul", "aten.add", 1)):
        path.write_text(damaged)
        assert store_of(model).load() is None
    # The next wrap has one again.
    calls = count_captures(monkeypatch)
    wrap(model)
    assert calls == [1] and path.read_text() == text


def test_a_stored_capture_that_is_wrong_is_replaced(
    model: LlamaForCausalLM, kept: Kept, monkeypatch: pytest.MonkeyPatch
) -> None:
    # What no key sees: a forward replaced on the instance, here one that scales the final norm.
    norm = model.model.norm
    forward = norm.forward
    norm.forward = lambda x: forward(x) * 1.5  # type: ignore[method-assign]
    calls = count_captures(monkeypatch)
    prompt, wanted = text_of(model)
    assert torch.equal(wrap(model).generate(prompt, max_new_tokens=10), wanted)
    assert calls == [1]


@pytest.mark.usefixtures("own_cache")
def test_a_wrong_fresh_capture_is_an_error(model: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch) -> None:
    capture = stages_module.capture

    def tampered(*args, **kwargs):  # type: ignore[no-untyped-def]
        graph = capture(*args, **kwargs)
        node = next(node for node in graph.graph.nodes if node.target is torch.ops.aten.cos.default)
        node.target = torch.ops.aten.sin.default
        return graph

    monkeypatch.setattr(stages_module, "capture", tampered)
    with pytest.raises(CaptureMismatch):
        wrap(model)


# --- other families ------------------------------------------------------------------------------


@pytest.mark.usefixtures("own_cache")
def test_what_was_observed_is_stored_with_the_graph() -> None:
    """Latent keys and values of different sizes, windows, masks that are never used, the route and why."""
    for name in ("deepseek_v3", "gemma2", "bart"):
        model = family(name)
        step = captured(model)
        store = CaptureStore(model, step.info, CacheFolder())
        store.save(step.graph, step.observed)
        stored = store.load()
        assert stored is not None and stored.observed == step.observed, name
        assert to_python(stored.graph(step.arena.layout)) == to_python(step.graph), name


@pytest.mark.usefixtures("own_cache")
def test_constants_and_tables_of_its_own_are_stored() -> None:
    rope = {"rope_theta": 10000.0, "rope_type": "dynamic", "factor": 4.0}
    kinds = set()
    for model in (family("falcon"), tiny_llama(max_positions=64, rope_parameters=rope)):
        step = captured(model)
        store = CaptureStore(model, step.info, CacheFolder())
        store.save(step.graph, step.observed)
        stored = store.load()
        assert stored is not None
        graph = stored.graph(step.arena.layout)
        assert to_python(graph) == to_python(step.graph)
        for name, port in step.graph.ports.items():
            other = graph.ports[name]
            if port.role != "weight":
                continue
            assert port.value is not None and other.value is not None
            assert (other.path, other.own, other.dtype) == (port.path, port.own, port.dtype)
            assert torch.equal(other.value, port.value)
            shared = other.value.data_ptr() == port.value.data_ptr()
            # Constants come from the file and tables are copies; all else is the model's own storage.
            kind = "constant" if port.path is None else "copy" if port.own else "shared"
            assert shared == (kind == "shared"), name
            kinds.add(kind)
    assert kinds == {"constant", "copy", "shared"}


def test_sizes_that_collide_with_the_stored_examples_are_captured_anew(
    model: LlamaForCausalLM, kept: Kept, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Passes know what varies by the example sizes, so none of them may be the arena's number of slots."""
    captures = count_captures(monkeypatch)
    prompt, wanted = text_of(model)
    for number, size in enumerate(kept.graph.sizes.values(), 1):
        spec = wrap(model, max_batch=size - 1)
        graph = spec.stages["capture"].graph
        assert size in graph.layout.sizes and size not in graph.sizes.values()
        assert torch.equal(spec.generate(prompt, max_new_tokens=10), wanted)
        assert len(captures) == number


@pytest.mark.usefixtures("own_cache")
def test_a_capture_of_the_models_own_attention_serves_every_arena_size(monkeypatch: pytest.MonkeyPatch) -> None:
    model = family("bloom")
    captures = count_captures(monkeypatch)
    prompt, wanted = text_of(model)
    for sizes in ({}, {"max_len": 200, "max_batch": 3}):
        spec = wrap(model, **sizes)
        assert spec.route == "eager" and torch.equal(spec.generate(prompt, max_new_tokens=10), wanted)
    assert len(captures) == 1


# --- the other route -----------------------------------------------------------------------------


def tampered(routes: dict[str, int], monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Makes captures by these routes wrong in the layer given; returns the routes captured, as they come."""
    seen: list[str] = []
    capture = stages_module.capture

    def wrong(model: Any, info: Any, observed: Any, layout: Any) -> StepGraph:
        graph = capture(model, info, observed, layout)
        seen.append(observed.route)
        if observed.route in routes:
            port = graph.ports[f"model_layers_{routes[observed.route]}_input_layernorm_weight"]
            assert port.value is not None
            graph.ports[port.name] = replace(port, value=port.value * 1.5)
        return graph

    monkeypatch.setattr(stages_module, "capture", wrong)
    return seen


@pytest.mark.usefixtures("own_cache")
def test_where_the_attention_op_differs_the_models_own_attention_is_taken(
    model: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = tampered({"attention": 0}, monkeypatch)
    prompt, wanted = text_of(model)
    for _ in range(2):  # captured, then from the store
        with wrap(model) as spec:
            assert torch.equal(spec.generate(prompt, max_new_tokens=10), wanted)
            assert spec.route == "eager"
            assert spec.route_reason.startswith("its attention is not what the attention op computes")
    assert seen == ["attention", "eager"]


def test_where_both_routes_differ_the_first_is_told_and_nothing_is_stored(
    monkeypatch: pytest.MonkeyPatch, own_cache: Path
) -> None:
    model = tiny_llama()
    seen = tampered({"attention": 0, "eager": 1}, monkeypatch)
    with raises(CaptureMismatch, where=re.compile(r"first wrong is model\.layers\.0")):
        wrap(model)
    assert seen == ["attention", "eager"]
    assert not list(own_cache.rglob("*.json"))


def test_where_the_model_has_no_other_route_the_mismatch_is_told(
    monkeypatch: pytest.MonkeyPatch, own_cache: Path
) -> None:
    model = tiny_llama()
    seen = tampered({"attention": 1}, monkeypatch)
    observe = stages_module.observe

    def one_route(model: Any, info: Any, routes: Any) -> Any:
        if "attention" not in routes:
            raise UnsupportedModel(model=info.name, reason="not by that route")
        return observe(model, info, routes)

    monkeypatch.setattr(stages_module, "observe", one_route)
    with raises(CaptureMismatch, where=re.compile(r"first wrong is model\.layers\.1")):
        wrap(model)
    assert seen == ["attention"] and not list(own_cache.rglob("*.json"))


def test_a_capture_that_was_not_checked_is_not_stored(
    model: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch, own_cache: Path
) -> None:
    def interrupted(*args: object) -> float:
        raise KeyboardInterrupt

    monkeypatch.setattr(attempts, "check_capture", interrupted)
    with pytest.raises(KeyboardInterrupt):
        wrap(model)
    assert not list(own_cache.rglob("*.json"))


@pytest.mark.usefixtures("own_cache")
def test_parameters_with_capital_letters_are_found_again(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = count_captures(monkeypatch)
    texts = []
    for _ in range(2):
        with wrap(family("mpt")) as spec:
            texts.append(spec.generate(torch.arange(5, 10)[None], max_new_tokens=10).tolist())
    assert calls == [1] and texts[0] == texts[1]


def test_a_bias_cut_out_of_a_longer_table_fits_any_cache() -> None:
    # mpt slices its ALiBi table of 512 places at 512 - S, a number that may be a multiple of anything.
    model = family("mpt")
    for max_len, tiers, cut in ((63, (0, 3), 5 * 89), (45, (0, 7), 27 * 17), (300, (0, 3), 16 * 13)):
        with speccompile.wrap(model, "ngram", tiers=tiers, max_len=max_len, backend="eager") as spec:
            assert 512 - spec.arena["k_0"].shape[1] == cut
            assert spec.check([[5, 6, 7, 8] * 6], max_new_tokens=8)


def test_a_cache_that_is_longer_than_the_table_is_refused() -> None:
    with raises(UnsupportedModel, reason=re.compile(r"cache of 516 positions.*use a smaller max_len \(now 512\)")):
        speccompile.wrap(family("mpt"), "none", tiers=(0, 3), max_len=512, backend="eager")

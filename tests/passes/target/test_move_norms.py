"""Bodies that end with the norm of the next layer, so that the residual addition and the norm are one kernel."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

import speccompile
from speccompile import Tree
from speccompile.heads import MtpHead
from speccompile.passes.step.tap_hidden import Tap, _place
from speccompile.passes.target.outline import call_of
from speccompile.speculator.speculator import Speculator
from support.as_on_cuda import as_on_cuda
from support.families import SIZES, assert_texts, model_of, periodic
from support.tiny import tiny_llama

LAYERS = 4
PROMPTS = [periodic(1)[:38], periodic(2)[:9]]


@pytest.fixture(autouse=True)
def backend() -> Iterator[str]:
    with as_on_cuda() as name:
        yield name


def wrapped(model: Any, mode: str = "none", tiers: Any = (0,), **options: Any) -> Speculator:
    return speccompile.wrap(model, mode, tiers=tiers, **{**SIZES, "backend": "as_on_cuda", **options})


@pytest.mark.parametrize("family", ["gemma2", "gpt2", "qwen3_next"])
def test_families_decode_as_before(family: str) -> None:
    model = model_of(family)
    with wrapped(model, "ngram", (0, 3)) as spec:
        layers = model.config.num_hidden_layers
        assert spec.stages["move_norms"].note == f"{layers} norms follow the addition before them"
        assert_texts(spec, model, PROMPTS)


@pytest.mark.parametrize(
    ("mode", "tiers"),
    [("early_exit", (0, 3)), ("draft_target", (0, Tree.static([[0], [1], [0, 0]])))],
    ids=str,
)
def test_layers_are_copied_and_read_trees(mode: str, tiers: Any) -> None:
    model = tiny_llama(num_hidden_layers=LAYERS)
    options: dict[str, Any] = {"exit_layer": 2} if mode == "early_exit" else {"draft": model}
    with wrapped(model, mode, tiers, **options) as spec:
        spec.set_tier(tiers[1])
        assert_texts(spec, model, PROMPTS)


def test_all_layers_but_the_last_share_a_body_that_returns_the_next_norm() -> None:
    with wrapped(tiny_llama(num_hidden_layers=LAYERS)) as spec:
        graph = spec.stages["outline"].graph
    inner, last = graph.bodies.values()
    assert (inner.layers, last.layers) == ((0, 1, 2), (3,))
    assert (len(inner.results), len(last.results)) == (2, 1)
    names = [node.name for node in inner.module.graph.find_nodes(op="placeholder")]
    assert names[:2] == ["hidden", "normed"] and "next_input_layernorm_weight" in names
    calls = [call_of(layer) for layer in graph.anchors.layers]
    assert all(call.args[0] is layer for call, layer in zip(calls[1:], graph.anchors.layers, strict=False))
    # The final norm is still computed outside, of the last layer's hidden state.
    assert graph.anchors.layers[-1].op == "call_module"


def test_taps_are_hidden_states_of_layers_by_index_and_path() -> None:
    with wrapped(tiny_llama(num_hidden_layers=LAYERS)) as spec:
        graph = spec.stages["outline"].graph.copy()
    for index, layer in enumerate(graph.anchors.layers):
        assert _place(graph, Tap(index)) is layer and _place(graph, Tap(f"model.layers.{index}")) is layer
        if index:
            assert _place(graph, Tap(index, before=True)) is graph.anchors.layers[index - 1]
    assert _place(graph, Tap(0, before=True)).target is torch.ops.aten.embedding.default


def test_modules_that_do_not_follow_one_another_stay_whole() -> None:
    """Each MTP module begins with a norm of the embedding, and passes copy each without the others."""
    model = tiny_llama(num_hidden_layers=LAYERS)
    with wrapped(model, "mtp", (0, 2), draft=MtpHead.random(model, 2)) as spec:
        assert_texts(spec, model, PROMPTS)


def test_a_model_of_one_layer_stays_whole() -> None:
    model = tiny_llama(num_hidden_layers=1)
    with wrapped(model) as spec:
        assert spec.stages["move_norms"].note == "layers stay whole"
        assert_texts(spec, model, PROMPTS)

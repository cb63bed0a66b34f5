"""Outlining: equal layers call one body, unequal ones do not, and nothing changes but the form."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx

from speccompile.errors import AnchorError
from speccompile.graph.step_graph import StepGraph
from speccompile.graph.verify import verify
from speccompile.passes.target.choose_attention import ChooseAttention
from speccompile.passes.target.outline import OutlineLayers
from speccompile.tools.families import find_families, tiny_model
from support.errors import raises
from support.graph_runs import outcome
from support.tiny import captured, known_capture, tiny_llama

aten = torch.ops.aten


@pytest.fixture(scope="module")
def three_layers() -> StepGraph:
    return captured(tiny_llama(layers=3), 32).graph


def outlined(graph: StepGraph, edit: Callable[[StepGraph], None] | None = None) -> StepGraph:
    """A copy of ``graph``, changed by ``edit``, and outlined."""
    graph = graph.copy()
    if edit is not None:
        edit(graph)
    if graph.graph.find_nodes(op="call_function", target=torch.ops.speccompile.attention.default):
        ChooseAttention().run(graph)
    changes = OutlineLayers().run(graph)
    verify(graph, "outline")
    assert changes.matched == len(set(graph.anchors.layers))
    return graph


def calls(graph: StepGraph) -> list[fx.Node]:
    return [node for node in graph.graph.nodes if node.op == "call_module"]


# --- one body for equal layers -------------------------------------------------------------------


def test_equal_layers_share_one_body(three_layers: StepGraph) -> None:
    graph = outlined(three_layers)
    (body,) = graph.bodies.values()
    assert body.layers == (0, 1, 2) and body.name == "decoder_layer"
    assert [node.target for node in calls(graph)] == ["decoder_layer"] * 3
    assert [node.meta["layer"] for node in calls(graph)] == [0, 1, 2]
    # Each call reads its own weights and cache, and the layer before it.
    for layer, node in enumerate(calls(graph)):
        names = [item.name for item in node.args]
        own = [name for name in names if "layers_" in name]
        assert len(own) == 9 and all(name.startswith(f"model_layers_{layer}_") for name in own)
        assert {f"k_{layer}", f"v_{layer}"} <= set(names)
        assert node.args[0] is (calls(graph)[layer - 1] if layer else graph.anchors.start)
    assert graph.anchors.layers == calls(graph)
    assert not [node for node in graph.graph.nodes if node.op == "call_function" and "layer" in node.meta]


def test_a_body_is_named_by_what_it_takes(three_layers: StepGraph) -> None:
    graph = outlined(three_layers)
    body = graph.bodies["decoder_layer"]
    names = [node.name for node in body.module.graph.find_nodes(op="placeholder")]
    assert names[0] == "hidden"
    assert {"k_cache", "v_cache", "self_attn_q_proj_weight", "input_layernorm_weight", "row_slots"} <= set(names)
    assert not [name for name in names if "layers" in name]
    assert len(names) == len(body.dims) == len(body.dtypes) == len(calls(graph)[0].args)
    # Sizes that vary, between steps or between arenas, have names; fixed ones stay numbers.
    assert body.dims[0] == ("B", "T", 64) and body.dims[names.index("row_slots")] == ("B",)
    assert body.dims[names.index("k_cache")] == ("N", "S", 2, 16)
    assert body.dtypes[names.index("position_ids")] is torch.int64


def test_mutates_says_what_the_body_writes(three_layers: StepGraph) -> None:
    graph = outlined(three_layers)
    body = graph.bodies["decoder_layer"]
    names = [node.name for node in body.module.graph.find_nodes(op="placeholder")]
    assert {names[index] for index in body.mutates} == {"k_cache", "v_cache"}
    # Truly: nothing else of the inputs changes when it runs.
    generator = torch.Generator().manual_seed(0)
    sizes: dict[Any, int] = {"B": 2, "T": 3, "N": 2, "S": 8}
    inputs = []
    for dims, dtype in zip(body.dims, body.dtypes, strict=True):
        shape = [sizes.get(size, size) for size in dims]
        if dtype is torch.int64:
            inputs.append(torch.arange(torch.Size(shape).numel()).reshape(shape))
        else:
            inputs.append(torch.randn(shape, generator=generator))
    before = [tensor.clone() for tensor in inputs]
    with torch.no_grad():
        body.module(*inputs)
    changed = {i for i, (a, b) in enumerate(zip(before, inputs, strict=True)) if not torch.equal(a, b)}
    assert changed == body.mutates


@pytest.mark.parametrize(("rows", "width"), [(1, 1), (2, 5), (3, 8)])
def test_outlined_computes_the_same(three_layers: StepGraph, rows: int, width: int) -> None:
    graph = outlined(three_layers)
    flat, grouped = outcome(three_layers, rows, width), outcome(graph, rows, width)
    assert flat.keys() == grouped.keys() and len(flat) == 7
    for name, value in flat.items():
        assert torch.equal(value, grouped[name]), name


def test_a_tap_on_two_layers_reads_both(three_layers: StepGraph) -> None:
    graph = outlined(three_layers)
    first, second, third = graph.anchors.layers
    joined = graph.insert(lambda *hidden: torch.cat(hidden, dim=-1), first, second, third)
    assert joined.all_input_nodes == [first, second, third]


# --- bodies of their own -------------------------------------------------------------------------


def scalar_of_layer(layer: int) -> Callable[[StepGraph], None]:
    """Changes the attention scale of one layer."""

    def edit(graph: StepGraph) -> None:
        node = graph.graph.find_nodes(op="call_function", target=torch.ops.speccompile.attention.default)[layer]
        node.args = (*node.args[:5], 0.3)

    return edit


def op_of_layer(layer: int) -> Callable[[StepGraph], None]:
    """Changes the activation of one layer."""

    def edit(graph: StepGraph) -> None:
        graph.graph.find_nodes(op="call_function", target=aten.silu.default)[layer].target = aten.gelu.default

    return edit


def wiring_of_layer(layer: int) -> Callable[[StepGraph], None]:
    """Lets one layer project queries and outputs by the same weight: the same ops on fewer inputs."""

    def edit(graph: StepGraph) -> None:
        nodes = {node.name: node for node in graph.placeholders}
        first, second = (nodes[f"model_layers_{layer}_self_attn_{name}_proj_weight"] for name in "qo")
        second.replace_all_uses_with(first)

    return edit


@pytest.mark.parametrize("edit", [scalar_of_layer, op_of_layer, wiring_of_layer])
@pytest.mark.parametrize("layer", [0, 1, 2])
def test_a_layer_that_differs_gets_a_body_of_its_own(
    three_layers: StepGraph, edit: Callable[[int], Callable[[StepGraph], None]], layer: int
) -> None:
    graph = outlined(three_layers, edit(layer))
    others = tuple(other for other in range(3) if other != layer)
    groups = sorted(body.layers for body in graph.bodies.values())
    assert groups == sorted([(layer,), others])
    for node, index in zip(calls(graph), range(3), strict=True):
        assert index in graph.bodies[str(node.target)].layers
    assert len({body.key for body in graph.bodies.values()}) == 2
    assert set(graph.bodies) == {"decoder_layer", "decoder_layer_1"}

    changed = three_layers.copy()
    edit(layer)(changed)
    changed.remove_dead_code()
    flat, grouped = outcome(changed, 2, 5), outcome(graph, 2, 5)
    assert all(torch.equal(value, grouped[name]) for name, value in flat.items())
    assert not torch.equal(flat["logits"], outcome(three_layers, 2, 5)["logits"])


def test_the_same_change_in_two_layers_is_shared(three_layers: StepGraph) -> None:
    def edit(graph: StepGraph) -> None:
        scalar_of_layer(0)(graph)
        scalar_of_layer(2)(graph)

    graph = outlined(three_layers, edit)
    assert sorted(body.layers for body in graph.bodies.values()) == [(0, 2), (1,)]


def test_keys_do_not_depend_on_names_and_do_on_constants(three_layers: StepGraph) -> None:
    (body,) = outlined(three_layers).bodies.values()
    (other_weights,) = outlined(captured(tiny_llama(seed=5, layers=2), 32).graph).bodies.values()
    assert body.key == other_weights.key
    (other_epsilon,) = outlined(captured(tiny_llama(layers=2, rms_norm_eps=1e-5), 32).graph).bodies.values()
    (other_sizes,) = outlined(captured(tiny_llama(layers=2, heads=2), 32).graph).bodies.values()
    assert len({body.key, other_epsilon.key, other_sizes.key}) == 3


# --- other families ------------------------------------------------------------------------------


@functools.cache
def family(name: str, **overrides: Any) -> StepGraph:
    model = tiny_model(find_families([name])[0], **overrides)
    return known_capture(model, 32).graph


def outlined_family(name: str, **overrides: Any) -> StepGraph:
    """Outlined, and seen to compute the same as before."""
    flat = family(name, **overrides)
    graph = outlined(flat)
    before, after = outcome(flat, 2, 5), outcome(graph, 2, 5)
    assert before.keys() == after.keys() and all(torch.equal(value, after[key]) for key, value in before.items())
    return graph


def groups(graph: StepGraph) -> list[tuple[int, ...]]:
    return sorted(body.layers for body in graph.bodies.values())


def test_sizes_stay_local(three_layers: StepGraph) -> None:
    """A body reads rows and width from its own tensors: what crosses its border are tensors alone."""
    for flat in (three_layers, family("gpt2", num_layers=3), family("mixtral", num_layers=3)):
        graph = outlined(flat)
        for call in calls(graph):
            assert all(isinstance(node.meta["val"], torch.Tensor) for node in call.all_input_nodes)
        # No size computed from what a layer left crosses into what stands outside of the layers, either.
        left = set(calls(graph))
        sizes = [node for node in graph.graph.nodes if node.target is aten.sym_size.int]
        assert not [size for size in sizes if size.args[0] in left]
        for body in graph.bodies.values():
            assert not [size for size in body.dims[0] if size not in ("B", "T", 64)]


@pytest.mark.parametrize("name", ["gpt2", "mixtral"])
def test_equal_layers_of_other_families_share_one_body(name: str) -> None:
    assert groups(outlined_family(name, num_layers=3)) == [(0, 1, 2)]


def test_layers_with_different_windows_get_different_bodies() -> None:
    assert groups(outlined_family("gemma2", num_layers=4)) == [(0, 2), (1, 3)]


def test_a_dense_layer_differs_from_those_with_experts() -> None:
    graph = outlined_family("deepseek_v3", num_layers=3)
    kinds = {call.meta["layer"]: any("experts" in node.name for node in call.args) for call in calls(graph)}
    assert set(kinds.values()) == {False, True} and not kinds[0]
    assert all(len({kinds[layer] for layer in body.layers}) == 1 for body in graph.bodies.values())


def test_a_layer_that_is_skipped_passes_its_input_on() -> None:
    """Cross-attention without an image: the layer leaves what the one before it left."""
    graph = outlined_family("mllama", num_layers=3)
    layers = graph.anchors.layers
    skipped = [index for index in range(1, len(layers)) if layers[index] is layers[index - 1]]
    assert skipped and len(calls(graph)) == len(layers) - len(skipped)
    run = {index for body in graph.bodies.values() for index in body.layers}
    assert run == set(range(len(layers))) - set(skipped)


def test_layers_that_share_the_kv_of_others_get_a_body_of_their_own() -> None:
    graph = outlined_family("gemma3n_text")
    kv = {call.meta["layer"]: {node.name for node in call.args if node.name[:2] == "k_"} for call in calls(graph)}
    assert len(kv) == 4 and kv[0] | kv[1] == {"k_0", "k_1"}
    for layer in (2, 3):
        assert len(kv[layer]) == 1 and kv[layer] <= kv[0] | kv[1]
        (body,) = (body for body in graph.bodies.values() if layer in body.layers)
        assert not body.mutates


def test_bodies_take_what_lies_in_order() -> None:
    """Each layer of Gemma 4 reads a slice of one tensor; compiled for whole tensors, it would read others' parts."""
    for name in ("gemma3n_text", "gemma4_text"):
        graph = outlined_family(name)
        inputs = [node for call in calls(graph) for node in call.all_input_nodes]
        assert any(node.target is aten.contiguous.default for node in inputs)
        assert all(node.meta["val"].is_contiguous() for node in inputs)


def test_a_layer_that_reads_no_hidden_state_is_refused(three_layers: StepGraph) -> None:
    def edit(graph: StepGraph) -> None:
        for node in graph.graph.nodes:
            if node.meta.get("layer") == 1:
                del node.meta["layer"]
        # All that is left of layer 1 is a piece that only reads a weight.
        weight = next(node for node in graph.placeholders if node.name == "model_norm_weight")
        graph.anchors.layers[1] = graph.insert(torch.exp, weight, before=graph.anchors.final_norm)
        graph.anchors.layers[1].meta["layer"] = 1

    with raises(AnchorError, anchor=re.compile("the input of decoder layer 1")):
        outlined(three_layers, edit)

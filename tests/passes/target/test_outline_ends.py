"""The ops around the layers as bodies: the same is computed, in symbolic sizes, and other passes find their anchors."""

from __future__ import annotations

import pytest
import torch
from torch import fx

from speccompile.graph.step_graph import StepGraph
from speccompile.graph.verify import verify
from speccompile.passes.target.choose_attention import ChooseAttention
from speccompile.passes.target.outline import OutlineLayers, layer_input
from speccompile.passes.target.outline_ends import OutlineEnds
from speccompile.tools.families import find_families, tiny_model
from support.graph_runs import outcome
from support.tiny import known_capture, tiny_llama

aten = torch.ops.aten


def outlined(flat: StepGraph) -> StepGraph:
    """A copy of ``flat`` with layers and ends outlined."""
    graph = flat.copy()
    if graph.graph.find_nodes(op="call_function", target=torch.ops.speccompile.attention.default):
        ChooseAttention().run(graph)
    for item in (OutlineLayers(), OutlineEnds()):
        item.run(graph)
        verify(graph, item.name)
    return graph


@pytest.fixture(scope="module")
def llama() -> StepGraph:
    return known_capture(tiny_llama(), 32).graph


def called(graph: StepGraph) -> list[str]:
    return [str(node.target) for node in graph.graph.nodes if node.op == "call_module"]


def outside(graph: StepGraph) -> list[str]:
    return [str(node.target) for node in graph.graph.nodes if node.op == "call_function"]


def test_one_body_stands_before_the_layers_and_one_after_them(llama: StepGraph) -> None:
    graph = outlined(llama)
    assert called(graph) == ["prologue", "decoder_layer", "decoder_layer", "epilogue"]
    assert not any("cos" in op or "embedding" in op or "rsqrt" in op for op in outside(graph))
    assert "aten.linear.default" in outside(graph)
    prologue, epilogue = graph.bodies["prologue"], graph.bodies["epilogue"]
    # Embedding, cosines and sines; rows and width are symbolic, so one artifact serves all steps.
    assert [result.dims for result in prologue.results] == [("B", "T", 64), ("B", "T", 16), ("B", "T", 16)]
    assert [dims for dims in epilogue.dims] == [("B", "T", 64), (64,)]
    assert not prologue.layers and not prologue.mutates
    # The anchors that other passes work from lead to the same values.
    assert graph.anchors.final_norm.target == "epilogue"
    assert graph.anchors.start.target == "prologue"
    assert layer_input(graph, 0).meta["val"].shape[-1] == 64


@pytest.mark.parametrize("name", ["gemma3n_text", "bloom"])
def test_other_families_compute_the_same(name: str) -> None:
    flat = known_capture(tiny_model(find_families([name])[0]), 32).graph
    graph = outlined(flat)
    assert {"prologue", "epilogue"} & graph.bodies.keys()
    for rows, width in ((1, 1), (2, 5)):
        before, after = outcome(flat, rows, width), outcome(graph, rows, width)
        assert before.keys() == after.keys() and all(torch.equal(value, after[key]) for key, value in before.items())


def test_no_view_and_no_size_is_a_result(llama: StepGraph) -> None:
    """A compiled body cannot return the memory of its inputs, and returns only tensors."""

    def edit(graph: StepGraph) -> StepGraph:
        graph = graph.copy()
        hidden = graph.anchors.layers[0]
        first = next(node for node in graph.graph.nodes if node.meta.get("layer") == 0)
        positions = graph.anchors.positions
        wide = graph.insert(lambda positions: positions.unsqueeze(-1), positions, before=first)
        added = graph.insert(lambda hidden, wide: hidden + wide, hidden, wide, before=hidden.next)
        added.meta["layer"] = 0
        hidden.replace_all_uses_with(added, delete_user_cb=lambda user: user is not added)
        graph.anchors.layers[0] = added
        return graph

    flat = edit(llama)
    graph = outlined(flat)
    assert len(graph.bodies["prologue"].results) == 3 and "aten.unsqueeze.default" in outside(graph)
    before, after = outcome(flat, 2, 5), outcome(graph, 2, 5)
    assert all(torch.equal(value, after[key]) for key, value in before.items())


def test_what_is_a_single_op_stays_as_it_is() -> None:
    """GPT-2's final norm is one kernel of torch's."""
    graph = outlined(known_capture(tiny_model(find_families(["gpt2"])[0]), 32).graph)
    assert "epilogue" not in graph.bodies and "aten.layer_norm.default" in outside(graph)


def test_an_end_without_readers_is_removed(llama: StepGraph) -> None:
    """As in a prompt's chunk that chooses no token."""
    graph = outlined(llama)
    last = graph.anchors.layers[-1]
    graph.anchors.final_norm = graph.anchors.lm_head = last
    graph.set_outputs()
    graph.remove_dead_code()
    assert called(graph) == ["prologue", "decoder_layer", "decoder_layer"]


def test_a_part_that_writes_stays_as_it_is(llama: StepGraph) -> None:
    graph = llama.copy()
    norm = graph.anchors.final_norm
    written: fx.Node = graph.insert(lambda norm: norm.mul_(1.0), norm, before=norm.next)
    norm.replace_all_uses_with(written, delete_user_cb=lambda user: user is not written)
    graph.anchors.final_norm = written
    assert "epilogue" not in outlined(graph).bodies


def test_a_named_value_can_still_be_given(llama: StepGraph) -> None:
    """A head's projection of the target's hidden states is computed by the head, or comes from the draft before."""
    graph = llama.copy()
    embedding = layer_input(graph, 0)
    doubled: fx.Node = graph.insert(lambda hidden: hidden * 2, embedding, before=embedding.next)
    embedding.replace_all_uses_with(doubled, delete_user_cb=lambda user: user is not doubled)
    graph.name_value("fused", doubled)
    graph = outlined(graph)
    assert graph.values["fused"].target is aten.mul.Tensor and layer_input(graph, 0) is graph.values["fused"]
    # Cosines and sines are left.
    assert len(graph.bodies["prologue"].results) == 2

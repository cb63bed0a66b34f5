"""Sizes are made where they are needed: no size crosses the border of a layer, and equal layers stay equal."""

from __future__ import annotations

import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import fx

from speccompile.errors import AnchorError
from speccompile.graph.body import size_of
from speccompile.graph.state import primes_clear_of
from speccompile.graph.step_graph import StepGraph
from speccompile.graph.verify import verify
from speccompile.lowering.backends import Eager
from speccompile.passes.target.local_sizes import factors, keep_sizes_local
from support.errors import raises
from support.families import model_of
from support.tiny import known_capture, tiny_llama


def is_size(node: fx.Node) -> bool:
    return isinstance(node.meta["val"], int)


def crossing(graph: StepGraph) -> list[tuple[str, str]]:
    """(size, reader) where a size is read in another layer than it is made in."""
    nodes = [node for node in graph.graph.nodes if node.op == "call_function"]
    pairs = [(size, node) for node in nodes for size in node.all_input_nodes if is_size(size)]
    return [(a.name, b.name) for a, b in pairs if a.meta.get("layer") != b.meta.get("layer")]


@pytest.mark.parametrize("name", ["gpt2", "mixtral", "bloom"])
def test_no_size_crosses_a_layer_and_the_numbers_stay(name: str) -> None:
    found = known_capture(model_of(name))
    local = found.graph.copy()
    assert crossing(local)
    keep_sizes_local(local)
    for node in local.graph.nodes:
        node.meta.setdefault("pass", "local_sizes")
    verify(local, "local_sizes")
    assert crossing(local) == []
    tokens = torch.tensor([[5, 6, 7], [8, 9, 10]])
    inputs = {
        "input_ids": tokens,
        "position_ids": torch.tensor([[0, 1, 2], [4, 5, 6]]),
        "row_slots": torch.tensor([2, 0]),
    }
    results = []
    for graph in (found.graph, local):
        arguments = []
        for node in graph.placeholders:
            port = graph.ports[node.name]
            state = found.arena[node.name].clone() if port.role == "state" else port.value
            arguments.append(inputs.get(node.name, state))
        with torch.no_grad():
            results.append(Eager("reference").lower(graph, "a test")(*arguments)[0])
    assert torch.equal(results[0], results[1])


@pytest.fixture(scope="module")
def llama() -> StepGraph:
    return known_capture(tiny_llama()).graph


def test_the_first_node_stays_the_first_reader_of_an_input(llama: StepGraph) -> None:
    graph = llama.copy()
    keep_sizes_local(graph)
    calls = [node for node in graph.graph.nodes if node.op == "call_function"]
    assert graph.anchors.start is calls[0]


def test_a_size_that_no_input_has_is_refused(llama: StepGraph) -> None:
    graph = llama.copy()
    reader = next(
        node for node in graph.graph.nodes if node.target is torch.ops.aten.view.default and "layer" in node.meta
    )
    with graph.graph.inserting_before(reader):
        odd = graph.graph.call_function(torch.ops.aten.sym_size.int, (reader.args[0], 0))
    odd.meta = {"val": 999_983}
    reader.args = (reader.args[0], [odd, *reader.args[1][1:]])  # type: ignore[index]
    with raises(AnchorError, reason=re.compile("no input of its reader is 999983 long")):
        keep_sizes_local(graph)


@given(st.sets(st.integers(0, 5000), max_size=30), st.integers(1, 400), st.sets(st.sampled_from("BT")))
def test_a_product_of_examples_is_told_from_every_size(fixed: set[int], rest: int, names: set[str]) -> None:
    taken = fixed | {rest}
    primes = primes_clear_of(taken)
    sizes = {"B": next(primes), "T": next(primes)}
    assert all(factors(size, sizes) == ([], size) for size in taken)
    value = rest
    for name in names:
        value *= sizes[name]
    found, left = factors(value, sizes)
    assert set(found) == names and left == rest
    text = "*".join([str(rest), *found])
    assert size_of(text, sizes) == value and size_of(7, sizes) == 7

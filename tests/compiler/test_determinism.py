"""The proof of ``deterministic=True``: it holds where it should, and finds an op that breaks it."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

import speccompile
from speccompile import Tree
from speccompile.compiler.determinism import everywhere, prove_deterministic, prove_trees, tree_corners
from speccompile.errors import DeterministicUnavailable
from speccompile.graph.step_graph import StepGraph
from speccompile.lowering.backends import Eager, Inductor
from speccompile.passes.target.tree_bodies import of_trees
from speccompile.speculator.speculator import Speculator
from support.errors import raises
from support.tiny import tiny_llama

Run = Callable[..., Any]

WIDTH = 4  # of tiers (0, 3)


@pytest.fixture(scope="module")
def spec() -> Speculator:
    """Built with the proof: that it came into being shows that the proof passes."""
    return speccompile.wrap(
        tiny_llama(), "early_exit", tiers=(0, 3), max_batch=2, max_len=32, backend="eager", deterministic=True
    )


@pytest.fixture(scope="module")
def graph(spec: Speculator) -> StepGraph:
    return spec.stages["outline"].graph


@pytest.fixture(scope="module")
def step(graph: StepGraph) -> Run:
    return Eager("reference").lower(graph, "the captured model")


def prove(spec: Speculator, graph: StepGraph, lowered: Run) -> None:
    prove_deterministic(graph, spec.stages["choose_linear"].graph, lowered, spec.arena, everywhere(2, WIDTH))


def placement(graph: StepGraph, inputs: tuple[torch.Tensor, ...]) -> dict[str, torch.Tensor]:
    return dict(zip([node.name for node in graph.placeholders], inputs, strict=True))


def test_the_eager_step_is_deterministic(spec: Speculator, graph: StepGraph, step: Run) -> None:
    seen = set()

    def watched(*inputs: torch.Tensor) -> Any:
        given = placement(graph, inputs)
        seen.add(tuple(given["input_ids"].shape))
        return step(*inputs)

    prove(spec, graph, watched)
    # Every call has the one shape that all tiers share.
    assert seen == {(2, WIDTH)}
    assert {(tier.key.rows, tier.key.width) for tier in spec.engine.tiers.values()} == {(2, WIDTH)}
    assert {name[:2] for name in spec.engine.tiers} == {(0, 2), (3, 2)}


def test_every_row_and_place_is_tried(spec: Speculator, graph: StepGraph, step: Run) -> None:
    """A result that is off by one bit in a single (row, place) is found, wherever that is."""
    for row in range(2):
        for place in range(WIDTH):

            def off(*inputs: torch.Tensor, row: int = row, place: int = place) -> Any:
                (logits,) = step(*inputs)
                logits[row, place] = torch.nextafter(logits[row, place], torch.tensor(torch.inf))
                return (logits,)

            with pytest.raises(DeterministicUnavailable):
                prove(spec, graph, off)


def test_a_result_that_depends_on_the_row_is_refused_with_the_evidence(
    spec: Speculator, graph: StepGraph, step: Run
) -> None:
    def by_row(*inputs: torch.Tensor) -> Any:
        (logits,) = step(*inputs)
        return (logits + torch.arange(logits.shape[0])[:, None, None] * 1e-3,)

    with raises(DeterministicUnavailable, evidence=re.compile("between row 1, position 0")) as caught:
        prove(spec, graph, by_row)
    # No op of the eager graph does that: it is in what the backend made of them.
    assert "compiled decoder layer" in caught.value.fields["op"]


def test_a_result_that_depends_on_a_neighbour_is_refused(spec: Speculator, graph: StepGraph, step: Run) -> None:
    def leaking(*inputs: torch.Tensor) -> Any:
        (logits,) = step(*inputs)
        other = placement(graph, inputs)["input_ids"].flip(0).sum(1)
        return (logits + other[:, None, None] * 1e-6,)

    with pytest.raises(DeterministicUnavailable):
        prove(spec, graph, leaking)


def test_keys_from_an_earlier_step_count(spec: Speculator, graph: StepGraph, step: Run) -> None:
    """A cache that is written differently by rows shows only in a later step, and is found."""

    def writes_by_row(*inputs: torch.Tensor) -> Any:
        result = step(*inputs)
        given = placement(graph, inputs)
        given["k_0"][1, given["position_ids"][1, 0]] += 1e-3
        return result

    with pytest.raises(DeterministicUnavailable):
        prove(spec, graph, writes_by_row)


@pytest.mark.parametrize("dim", [0, 1], ids=["row", "place"])
def test_the_op_is_named(spec: Speculator, dim: int) -> None:
    """An op in the second layer that treats rows, or places, differently is named, and nothing before or after it."""
    flat = spec.stages["choose_linear"].graph.copy()
    activation = flat.graph.find_nodes(op="call_function", target=torch.ops.aten.silu.default)[1]

    def uneven(x: torch.Tensor) -> torch.Tensor:
        return x + torch.ones_like(x).cumsum(dim) * 1e-3

    readers = set(activation.users)
    tilted = flat.insert(uneven, activation, before=activation.next)
    activation.replace_all_uses_with(tilted, delete_user_cb=lambda user: user in readers)
    (culprit,) = flat.graph.find_nodes(op="call_function", target=torch.ops.aten.cumsum.default)
    with raises(DeterministicUnavailable, op=f"{culprit.target} ({culprit.name})"):
        prove_deterministic(flat, flat, Eager("uneven").lower(flat, "uneven"), spec.arena, everywhere(2, WIDTH))


@pytest.mark.parametrize("max_len", [2, 5])
def test_the_cache_may_be_shorter_than_a_step(max_len: int) -> None:
    spec = speccompile.wrap(tiny_llama(), "ngram", tiers=(0, 7), max_len=max_len, backend="eager", deterministic=True)
    assert {tier.key.width for tier in spec.engine.tiers.values()} == {8}


# --- trees ---------------------------------------------------------------------------------------

TREES = (Tree.dynamic(nodes=6, depth=3, branches=3), Tree.static([(0,)]))


@pytest.fixture(scope="module")
def branching() -> Speculator:
    """Over kernels that keep a node's order of sums; built with the proof."""
    options: dict[str, Any] = {"tiers": (0, *TREES), "max_batch": 2, "max_len": 32, "backend": "inductor"}
    return speccompile.wrap(tiny_llama(), "ngram", deterministic=True, **options)


def prove_of_trees(spec: Speculator, broken: Callable[[StepGraph], Run]) -> None:
    outlined, backend = spec.stages["add_tree_bodies"].graph, Inductor("reference")
    graph = of_trees(outlined)
    lowered = backend.lower(outlined, "the captured model")
    prove_trees((lowered, outlined), (broken(graph), graph), spec.arena, tree_corners(2, map(int, TREES)))


def test_a_node_has_the_bits_of_a_chain(branching: Speculator) -> None:
    seen = set()

    def watched(graph: StepGraph) -> Run:
        step = Inductor("reference").lower(graph, "trees")

        def run(*inputs: torch.Tensor) -> Any:
            seen.add(tuple(placement(graph, inputs)["row_parents"].shape))
            return step(*inputs)

        return run

    prove_of_trees(branching, watched)
    assert seen == {(rows, int(tree) + 1) for rows in (1, 2) for tree in TREES}


def test_a_node_that_attends_to_its_siblings_is_refused(branching: Speculator) -> None:
    def broken(graph: StepGraph) -> Run:
        step = Inductor("reference").lower(graph, "trees")

        def run(*inputs: torch.Tensor) -> Any:
            given = placement(graph, inputs)
            if given["row_parents"].shape[1] == 7:
                # Node 3 is the sibling of the parent of node 6.
                given["row_parents"] = given["row_parents"].clone()
                given["row_parents"][:, 6].fill_(3)
            return step(*given.values())

        return run

    with raises(DeterministicUnavailable, evidence=re.compile("on a path of a tree of 6 nodes")):
        prove_of_trees(branching, broken)

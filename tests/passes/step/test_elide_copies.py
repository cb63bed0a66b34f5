"""Copies of what nothing reads later are not made, and all others are."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from speccompile import wrap
from speccompile.graph.step_graph import StepGraph
from speccompile.passes.step.elide_copies import ElideCopies
from support.tiny import tiny_llama

aten = torch.ops.aten
Function = Callable[[torch.Tensor], torch.Tensor]


@pytest.fixture
def graph() -> StepGraph:
    """The rows of a tier, which a test adds ops to."""
    spec = wrap(tiny_llama(), "none", max_len=16, backend="eager")
    return spec.stages["bind_rows"].graph.copy()


def elided(graph: StepGraph, function: Function) -> int:
    before = ElideCopies().run(graph).matched
    graph.insert(function, graph.state("length"))
    matched = ElideCopies().run(graph).matched
    graph.propagate()
    return matched - before


def changed(x: torch.Tensor) -> torch.Tensor:
    return x.clone().add_(1)


def read_before(x: torch.Tensor) -> torch.Tensor:
    y = x * 2
    total = y.sum()
    return changed(y) + total


def read_after(x: torch.Tensor) -> torch.Tensor:
    y = x * 2
    return changed(y) + y


def viewed_after(x: torch.Tensor) -> torch.Tensor:
    y = x * 2
    return changed(y[None]) + y[0:1]


def unsafely_viewed_after(x: torch.Tensor) -> torch.Tensor:
    y = x * 2
    return changed(aten._unsafe_view(y, [1, -1])) + y


@pytest.mark.parametrize(
    "function",
    [lambda x: changed(x * 2), lambda x: changed((x * 2)[None]), read_before],
    ids=["result", "view", "read"],
)
def test_a_copy_of_a_result_without_later_readers_is_not_made(graph: StepGraph, function: Function) -> None:
    assert elided(graph, function) == 1


@pytest.mark.parametrize(
    "function",
    [
        changed,
        lambda x: changed(x[0:1]),
        read_after,
        viewed_after,
        lambda x: (x * 2).to(torch.float32, copy=True).add_(1),
        lambda x: changed((x * 2)[None].expand(3, -1)),
        unsafely_viewed_after,
    ],
    ids=[
        "state",
        "view of state",
        "read after",
        "view read after",
        "other dtype",
        "other strides",
        "unsafe view",
    ],
)
def test_state_and_what_is_read_later_are_copied(graph: StepGraph, function: Function) -> None:
    assert elided(graph, function) == 0


@pytest.mark.parametrize(("kind", "copies"), [("sampled", 0), ("scored", 1)])
def test_scores_are_the_logits_changed_in_place_unless_logits_are_recorded(kind: str, copies: int) -> None:
    with wrap(tiny_llama(), "ngram", tiers=(0, 2), max_len=16, backend="eager") as spec:
        last = spec.pipeline(2, kind=kind).run(spec.stages["outline"].graph)[1]["elide_copies"]
    found = [
        node for node in last.graph.graph.nodes if node.target is aten._to_copy.default and node.meta["val"].ndim == 3
    ]
    assert len(found) == copies, last.note

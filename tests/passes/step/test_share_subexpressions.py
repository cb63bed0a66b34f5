"""Equal ops are computed once, and nothing else is taken for equal."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import fx

from speccompile import wrap
from speccompile.graph.step_graph import StepGraph
from speccompile.passes.step.share_subexpressions import ShareSubexpressions
from support.tiny import tiny_llama

aten = torch.ops.aten


@pytest.fixture
def graph() -> StepGraph:
    """The rows of a tier, which a test adds ops to."""
    spec = wrap(tiny_llama(), "none", max_len=16, backend="eager")
    return spec.stages["bind_rows"].graph.copy()


def shared(graph: StepGraph, function: Callable[..., torch.Tensor], *names: str) -> tuple[int, fx.Node]:
    """How many ops of ``function`` over state tensors are shared, and the node of its result."""
    ShareSubexpressions().run(graph)
    graph.insert(function, *map(graph.state, names))
    before = len(graph.graph.nodes)
    changes = ShareSubexpressions().run(graph)
    graph.propagate()
    assert before - len(graph.graph.nodes) == changes.matched
    return changes.matched, next(node for node in reversed(graph.graph.nodes) if node.op == "call_function")


def test_equal_ops_over_the_same_values_are_one(graph: StepGraph) -> None:
    count, last = shared(graph, lambda x: (x[0:1] * 2 + 1) + (x[0:1] * 2 + 1), "length")
    # slice, mul and add.
    assert count == 3 and last.args[0] is last.args[1]


def test_a_read_after_a_write_is_another_value(graph: StepGraph) -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        before = x * 2
        x.add_(1)
        return before + x * 2

    assert shared(graph, function, "length")[0] == 0


def test_a_write_of_another_tensor_changes_nothing(graph: StepGraph) -> None:
    def function(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        before = x * 2
        y.add_(1)
        return before + x * 2

    assert shared(graph, function, "length", "limit")[0] == 1


def test_a_write_through_a_view_is_seen(graph: StepGraph) -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        before = x * 2
        x[0:1].add_(1)
        return before + x * 2

    assert shared(graph, function, "length")[0] == 0


def test_results_that_are_written_stay_apart(graph: StepGraph) -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        left, right = x * 2, x * 2
        left.add_(1)
        return left + right

    assert shared(graph, function, "length")[0] == 0


@pytest.mark.parametrize(
    "function",
    [
        lambda x: torch.full((2,), 1.0) + torch.full((2,), 1),
        lambda x: x.sum(0, keepdim=True) + x.sum(0, keepdim=False),
        lambda x: torch.rand(2) + torch.rand(2),
    ],
)
def test_other_arguments_and_random_numbers_are_not_equal(
    graph: StepGraph, function: Callable[..., torch.Tensor]
) -> None:
    assert shared(graph, function, "length")[0] == 0


def test_no_tier_computes_an_op_twice() -> None:
    with wrap(tiny_llama(), "ngram", tiers=(0, 2), max_len=16, backend="eager") as spec:
        last = spec.pipeline(2).run(spec.stages["outline"].graph)[1]["share_subexpressions"]
        assert "ops computed once" in last.note and not last.note.startswith("0 ")
        assert ShareSubexpressions().run(last.graph.copy()).matched == 0

"""What is recorded of a function: the calls that make_fx would find."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from speccompile.graph.fakes import faking, kind, of_kind
from speccompile.graph.recording import ConstantTensor, record
from speccompile.ops.noise import coins


def fakes() -> list[torch.Tensor]:
    """Two of ``[3, 4]``."""
    with faking():
        return [of_kind((torch.Size((3, 4)), torch.float32, (4, 1), 0, torch.device("cpu"))) for _ in range(2)]


def calls_of(graph: fx.Graph) -> list[Any]:
    """Names, targets, arguments and results of all calls, and what is returned."""
    numbers = {node: index for index, node in enumerate(graph.nodes)}

    def numbered(value: Any) -> Any:
        if isinstance(value, list | tuple):
            return [numbered(item) for item in value]
        return ("node", numbers[value]) if isinstance(value, fx.Node) else value

    def kinds(value: Any) -> Any:
        return list(map(kind, value)) if isinstance(value, list | tuple) else kind(value)

    calls = [
        (node.name, node.target, numbered(node.args), numbered(list(node.kwargs.items())), kinds(node.meta["val"]))
        for node in graph.nodes
        if node.op == "call_function"
    ]
    return [*calls, numbered(graph.output_node().args[0])]


def written_in_place(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    x.index_put_((torch.arange(2),), y[:2])
    x[0] += 1
    return x * 2


def in_parts(x: torch.Tensor, y: torch.Tensor) -> list[torch.Tensor]:
    first, second = x.split(2, dim=1)
    values, places = (first @ second.mT).max(dim=-1)
    return [values + places, y.to(torch.int64)]


def of_other_ops(x: torch.Tensor, y: torch.Tensor) -> list[torch.Tensor]:
    return [torch.nn.functional.linear(x, y), torch.layer_norm(x, (4,)), x.reshape(2, 6), x]


def of_bits(x: torch.Tensor, y: torch.Tensor) -> list[torch.Tensor]:
    return [coins(x[:, 0].long(), 1, y.long(), y[:, 0].long()), torch.full((2,), y.shape[0])]


@pytest.mark.parametrize("inference", [False, True], ids=["usual", "inference"])
@pytest.mark.parametrize("function", [written_in_place, in_parts, of_other_ops, of_bits])
def test_the_graph_is_that_of_make_fx(function: Callable[..., Any], inference: bool) -> None:
    with faking():
        expected = make_fx(function)(*fakes()).graph
    with torch.inference_mode(inference), faking():
        graph, _ = record(function, fakes())
    if not isinstance(function(torch.ones(3, 4), torch.ones(3, 4)), list):
        expected.output_node().args = ((expected.output_node().args[0],),)
    assert calls_of(graph) == calls_of(expected)


def test_the_structure_is_that_of_the_result() -> None:
    with faking():
        graph, structure = record(lambda x, y: {"sum": x + y, "none": None, "both": (x, y)}, fakes())
    total, none, *both = graph.output_node().args[0]  # type: ignore[misc,union-attr]
    assert structure.unflatten([total, none, *both]) == {"sum": total, "none": None, "both": tuple(both)}
    assert none is None and both == graph.find_nodes(op="placeholder")


def test_one_object_given_twice_is_one_tensor() -> None:
    x, _ = fakes()
    with faking():
        graph, _ = record(torch.sub, [x, x])
    (call,) = graph.find_nodes(op="call_function", target=torch.ops.aten.sub.Tensor)
    assert call.args[0] is call.args[1]


@pytest.mark.parametrize(
    "function",
    [lambda x, y: x + torch.tensor([1.0, 2.0, 3.0, 4.0]), lambda x, y: torch.nn.functional.relu(torch.tensor(1.0))],
)
def test_tensors_of_python_numbers_are_refused(function: Callable[..., Any]) -> None:
    with faking(), pytest.raises(ConstantTensor, match="lift_fresh"):
        record(function, fakes())


def test_a_detached_tensor_is_the_tensor() -> None:
    with faking():
        graph, _ = record(lambda x, y: x.detach().add_(y), fakes())
    assert [node.target for node in graph.find_nodes(op="call_function", target=torch.ops.aten.detach.default)] == []

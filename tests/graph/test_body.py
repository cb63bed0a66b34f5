"""What a body says of its shapes, and that it is not believed blindly."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any
from weakref import WeakValueDictionary

import pytest
import torch
from torch import fx

from speccompile.graph import body as body_module
from speccompile.graph.body import Body, BodyResult, size_of
from speccompile.graph.fakes import fake

CPU = torch.device("cpu")
aten = torch.ops.aten


@pytest.fixture(autouse=True)
def none_was_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(body_module, "_RUN", set())
    monkeypatch.setattr(body_module, "_RESULTS", WeakValueDictionary())


def body_of(build: Callable[[fx.Graph, fx.Node, fx.Node], Any], key: str = "a", **fields: object) -> Body:
    """Of (hidden ``[B, T, 3]``, weight ``[3, 3]``), captured at B = 5 and T = 7."""
    graph = fx.Graph()
    hidden, weight = graph.placeholder("hidden"), graph.placeholder("weight")
    graph.output(build(graph, hidden, weight))
    given = {
        "name": "decoder_layer",
        "module": fx.GraphModule(torch.nn.Module(), graph),
        "dims": (("B", "T", 3), (3, 3)),
        "dtypes": (torch.float32, torch.float32),
        "results": (BodyResult(("B", "T", 3), torch.float32),),
        "captured": {"B": 5, "T": 7},
        "mutates": frozenset(),
        "layers": (0,),
        "key": key,
    }
    return Body(**given | fields)  # type: ignore[arg-type]


def product(graph: fx.Graph, hidden: fx.Node, weight: fx.Node) -> fx.Node:
    return graph.call_function(aten.matmul.default, (hidden, weight))


def with_size_left(graph: fx.Graph, hidden: fx.Node, weight: fx.Node) -> fx.Node:
    """The width of the capture is still in there."""
    flat = graph.call_function(aten.view.default, (hidden, [-1, 21]))
    return product(graph, graph.call_function(aten.view.default, (flat, [-1, 7, 3])), weight)


def inputs(rows: int, width: int, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    return [fake((rows, width, 3), dtype, CPU), fake((3, 3), torch.float32, CPU)]


def test_sizes_of_products() -> None:
    assert [size_of(dim, {"B": 3, "T": 2}) for dim in (4, "B", "4*B", "B*T")] == [4, 3, 12, 6]


def test_its_result_has_the_sizes_of_its_inputs() -> None:
    body = body_of(product)
    for rows, width in ((5, 7), (1, 1), (2, 4)):
        result = body.fake(inputs(rows, width))
        assert (tuple(result.shape), result.dtype) == ((rows, width, 3), torch.float32)
    halves = body_of(product, key="b", results=(BodyResult(("2*B", 3), torch.float16),))
    with pytest.raises(RuntimeError, match=r"must return .*float16\[4, 3\], got .*float32\[2, 4, 3\]"):
        halves.fake(inputs(2, 4))


def test_layers_of_one_call_are_run_once() -> None:
    module = body_of(product).module
    ran, results = [], []
    module.register_forward_pre_hook(lambda *_: ran.append(1))
    for layer in range(3):
        # The nodes of a graph hold the results.
        results.append(body_of(product, module=module, layers=(layer,)).fake(inputs(5, 7)))
        assert results[-1].shape == (5, 7, 3)
    assert ran == [1]


def test_of_several_results_all_are_remembered() -> None:
    def both(graph: fx.Graph, hidden: fx.Node, weight: fx.Node) -> Any:
        made = product(graph, hidden, weight)
        return made, graph.call_function(aten.sum.dim_IntList, (made, [-1]))

    results = BodyResult(("B", "T", 3), torch.float32), BodyResult(("B", "T"), torch.float32)
    body = body_of(both, results=results)
    ran = [body.fake(inputs(rows, 2)) for rows in (5, 4, 4)]
    assert [[tuple(item.shape) for item in made] for made in ran] == [[(n, 2, 3), (n, 2)] for n in (5, 4, 4)]
    wrong = body_of(both, key="c", results=(results[0], BodyResult(("B", 7), torch.float32)))
    with pytest.raises(RuntimeError, match=r"decoder_layer must return .*, got torch.float32\[4, 2\]"):
        wrong.fake(inputs(4, 2))


def test_a_fake_result_lives_as_long_as_a_graph_has_it() -> None:
    result = body_of(product).fake(inputs(5, 7))
    assert list(body_module._RESULTS.values()) == [result]
    del result
    gc.collect()
    assert not body_module._RESULTS


def test_one_laid_out_in_another_order_keeps_it() -> None:
    def across(graph: fx.Graph, hidden: fx.Node, weight: fx.Node) -> fx.Node:
        return graph.call_function(aten.transpose.int, (product(graph, hidden, weight), 0, 1))

    body = body_of(across, results=(BodyResult(None, torch.float32),))
    for rows, width in ((2, 4), (3, 2)):
        assert body.fake(inputs(rows, width)).stride() == (3, 3 * width, 1)


def test_a_size_that_the_capture_left_is_found() -> None:
    body = body_of(with_size_left)
    assert body.fake(inputs(5, 7)).shape == (5, 7, 3)
    for _ in range(2):
        with pytest.raises(RuntimeError):
            body.fake(inputs(2, 4))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (
            [fake((2, 4, 5), torch.float32, CPU), fake((3, 3), torch.float32, CPU)],
            r"input 0 .*\[2, 4, 3\].*\[2, 4, 5\]",
        ),
        ([fake((2, 4), torch.float32, CPU), fake((3, 3), torch.float32, CPU)], r"input 0 .*\[2, 4, 3\].*\[2, 4\]"),
        (inputs(2, 4, torch.float16), r"input 0 .*float32.*float16"),
        ([*inputs(2, 4)[:1], fake((3, 4), torch.float32, CPU)], r"input 1 .*\[3, 3\].*\[3, 4\]"),
    ],
)
def test_inputs_that_it_does_not_take(wrong: list[torch.Tensor], message: str) -> None:
    with pytest.raises(RuntimeError, match=message):
        body_of(product).fake(wrong)


def test_inputs_that_disagree() -> None:
    body = body_of(product, dims=(("B", "T", 3), ("B", 3)))
    with pytest.raises(RuntimeError, match="input 0 of decoder_layer"):
        body.fake(inputs(2, 4))

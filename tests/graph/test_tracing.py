"""What is traced once for a process, and what is distinguished."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import fx

from speccompile.graph import tracing
from speccompile.graph.fakes import fake
from speccompile.graph.tracing import Tracer
from speccompile.modes.network.other_vocabulary import at_most
from speccompile.ops.draft_rows import next_token
from speccompile.passes.step.draft_chain import one_after_another

CPU = torch.device("cpu")


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch) -> list[tracing.Call]:
    """Calls that are traced."""
    calls: list[tracing.Call] = []
    plain = tracing._traced

    def noted(call: tracing.Call) -> tracing.Trace:
        calls.append(call)
        return plain(call)

    monkeypatch.setattr(tracing, "_traced", noted)
    monkeypatch.setattr(tracing, "_kept", functools.lru_cache(noted))
    return calls


def nodes_of(*shapes: tuple[int, ...], dtype: torch.dtype = torch.int64) -> list[fx.Node]:
    graph = fx.Graph()
    nodes = [graph.placeholder(f"x{i}") for i in range(len(shapes))]
    for node, shape in zip(nodes, shapes, strict=True):
        node.meta["val"] = fake(shape, dtype, CPU)
    return nodes


def shapes_of(trace: tracing.Trace) -> list[tuple[int, ...]]:
    outputs: Any = trace.graph.output_node().args[0]
    return [tuple(node.meta["val"].shape) for node in outputs]


def test_a_function_of_this_package_is_traced_once_for_all_tracers(traced: list[tracing.Call]) -> None:
    traces = [Tracer().trace(at_most, nodes_of((3, 1)), {"most": 7}) for _ in range(3)]
    assert traces[0] is traces[1] is traces[2]
    assert len(traced) == 1 and shapes_of(traces[0]) == [(3, 1)]


def test_what_a_trace_depends_on_makes_another(traced: list[tracing.Call]) -> None:
    x, y = nodes_of((3, 1), (3, 1))
    tracer = Tracer()
    made = [
        tracer.trace(one_after_another, [x, y], {}),
        tracer.trace(one_after_another, [x, x], {}),
        tracer.trace(one_after_another, nodes_of((3, 1), (3, 2)), {}),
        tracer.trace(one_after_another, nodes_of((3, 1), (3, 1), dtype=torch.int32), {}),
        tracer.trace(next_token, [x, y], {}),
        tracer.trace(at_most, [x], {"most": 1}),
        tracer.trace(at_most, [x], {"most": 1.0}),
        tracer.trace(at_most, [x], {"most": True}),
        tracer.trace(torch.ops.aten.add.Tensor, [x, y], {}),
        tracer.trace(torch.ops.aten.sub.Tensor, [x, y], {}),
    ]
    torch.set_default_dtype(torch.float64)
    try:
        made.append(tracer.trace(one_after_another, [x, y], {}))
    finally:
        torch.set_default_dtype(torch.float32)
    assert len({id(trace) for trace in made}) == len(traced) == len(made)
    assert shapes_of(made[1]) == [(3, 2)] and shapes_of(made[2]) == [(3, 3)]


def test_a_view_of_a_part_is_no_whole_tensor(traced: list[tracing.Call]) -> None:
    graph = fx.Graph()
    whole, part = graph.placeholder("whole"), graph.placeholder("part")
    whole.meta["val"] = fake((2, 3), torch.int64, CPU)
    part.meta["val"] = fake((2, 6), torch.int64, CPU)[:, 3:]
    for node in (whole, part):
        (out,) = Tracer().trace(torch.ops.aten.t.default, [node], {}).graph.output_node().args[0]  # type: ignore[misc]
        assert out.meta["val"].stride() == node.meta["val"].t().stride()
        assert out.meta["val"].storage_offset() == node.meta["val"].storage_offset()
    assert len(traced) == 2


def test_code_from_outside_is_kept_as_long_as_its_tracer(traced: list[tracing.Call]) -> None:
    def doubled(x: torch.Tensor, *, by: Any = 2) -> torch.Tensor:
        return x * by

    tracer, x = Tracer(), nodes_of((2,))
    assert tracer.trace(doubled, x, {}) is tracer.trace(doubled, x, {})
    assert Tracer().trace(doubled, x, {}) is not tracer.trace(doubled, x, {})
    assert len(traced) == 2
    assert tracer.trace(doubled, x, {"by": 2}) is not tracer.trace(doubled, x, {"by": 2.0})


def test_a_constant_without_a_hash_is_traced_every_time(traced: list[tracing.Call]) -> None:
    def summed(x: torch.Tensor, *, more: list[int]) -> torch.Tensor:
        return x + sum(more)

    tracer, x, more = Tracer(), nodes_of((2,)), [1]
    first = tracer.trace(summed, x, {"more": more})
    more.append(2)
    second = tracer.trace(summed, x, {"more": more})
    add = torch.ops.aten.add.Tensor
    sums = [trace.graph.find_nodes(op="call_function", target=add)[0].args[1] for trace in (first, second)]
    assert sums == [1, 3]

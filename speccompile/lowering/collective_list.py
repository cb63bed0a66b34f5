"""List of the collectives that a finished step calls, and of the bytes that each rank sends for them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from speccompile.graph.fakes import faking
from speccompile.graph.step_graph import StepGraph
from speccompile.ops.collective import COLLECTIVES


@dataclass(frozen=True)
class CollectiveCall:
    """``calls`` calls of the collective ``name`` in one run of ``caller``: ``step``, or a body.

    Args:
        shape: shape of this rank's part.
        nbytes: bytes of this rank's parts in all ``calls``.
    """

    caller: str
    name: str
    calls: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    nbytes: int


def collectives_called(graph: StepGraph) -> tuple[CollectiveCall, ...]:
    """Return the collectives of one run of a finished step, in the order of their first call."""
    found: Counter[tuple[str, str, tuple[int, ...], torch.dtype]] = Counter()
    for node in graph.graph.nodes:
        if node.op == "call_module":
            name = str(node.target)
            runner = _CollectiveRecorder(graph.bodies[name].module)
            with faking():
                runner.run(*fx.map_arg(node.args, lambda item: item.meta["val"]))
            found.update((name, *call) for call in runner.found)
        elif node.op == "call_function":
            found.update(("step", *call) for call in _called(node.target, fx.map_arg(node.args, _fake)))
    return tuple(
        CollectiveCall(caller, name, calls, shape, dtype, calls * torch.Size(shape).numel() * dtype.itemsize)
        for (caller, name, shape, dtype), calls in found.items()
    )


def _fake(node: fx.Node) -> Any:
    return node.meta["val"]


def _called(target: Any, args: Any) -> Iterator[tuple[str, tuple[int, ...], torch.dtype]]:
    name = target._schema.name.removeprefix("speccompile::") if hasattr(target, "_schema") else ""
    if name in COLLECTIVES:
        yield name, tuple(map(int, args[0].shape)), args[0].dtype


class _CollectiveRecorder(fx.Interpreter):
    """Interpreter that runs a body on fakes, and records its collectives."""

    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module)
        self.found: list[tuple[str, tuple[int, ...], torch.dtype]] = []

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        self.found += _called(target, args)
        return super().call_function(target, args, kwargs)

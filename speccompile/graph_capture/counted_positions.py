"""Replacement of positions that a model counts from the length of the cache by each row's own positions.

A model without ``position_ids`` looks up its position embeddings at ``past .. past + T``, one range for the whole
batch. Captured over an empty past this is ``c + [0 .. T-1]`` with a constant c, which is replaced by ``c + positions``.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

import torch
from torch import fx

from speccompile.graph.stage import CAPTURE
from speccompile.graph.step_graph import StepGraph

aten = torch.ops.aten


def own_positions(graph: StepGraph) -> StepGraph:
    """Return the graph with look-ups at the rows' own positions, or ``graph`` itself if its ops do not accept them."""
    changed = graph.copy()
    for node, table, first in list(_counted(changed)):
        looked_up = changed.insert(_look_up, table, changed.anchors.positions, before=node, first=first)
        for new in (*looked_up.all_input_nodes, looked_up):
            new.meta["pass"] = CAPTURE
        node.replace_all_uses_with(looked_up)
        changed.graph.erase_node(node)
    changed.remove_dead_code()
    try:
        changed.propagate()
    except RuntimeError:
        # All rows share a table in a form without a dimension for rows. The capture check then refuses the model.
        return graph
    return changed


def _look_up(table: torch.Tensor, positions: torch.Tensor, *, first: int) -> torch.Tensor:
    """Return rows ``first + positions`` of ``table`` ``[P, M]``, as ``[B, T, M]``."""
    return torch.nn.functional.embedding(positions + first, table)


def _counted(graph: StepGraph) -> Iterator[tuple[fx.Node, fx.Node, int]]:
    """Yield (node, table, c) of each look-up at ``c + [0 .. T-1]``."""
    width = graph.sizes["T"]
    for node in graph.graph.nodes:
        found = lookup(node)
        if found is not None and found[2] == 0:
            table, index, _ = found
            counted = _evaluate(index)
            if counted is not None and counted.shape[-1] == width:
                first = int(counted.flatten()[0])
                if torch.equal(counted, torch.arange(first, first + width).expand_as(counted)):
                    yield node, table, first


def lookup(node: fx.Node) -> tuple[fx.Node, fx.Node, int] | None:
    """Return table, index and indexed dimension if ``node`` is a look-up, else None."""
    args: Any = node.args
    if node.target is aten.embedding.default:
        return args[0], args[1], 0
    if node.target in (aten.gather.default, aten.index_select.default):
        return args[0], args[2], args[1]
    if node.target is aten.index.Tensor:
        indexed = [(dim, index) for dim, index in enumerate(args[1]) if index is not None]
        if len(indexed) == 1:
            return args[0], indexed[0][1], indexed[0][0]
    return None


def _evaluate(index: fx.Node) -> torch.Tensor | None:
    """Return the value of ``index`` at the example sizes; None if it depends on tensors, not only on sizes."""
    values: dict[fx.Node, Any] = {}

    def value(node: fx.Node) -> Any:
        if node not in values:
            if node.target is aten.sym_size.int:
                values[node] = node.meta["val"]
            elif node.op == "placeholder":
                raise LookupError
            else:
                args = cast(Any, fx.map_arg(node.args, value))
                kwargs = cast(Any, fx.map_arg(node.kwargs, value))
                if "device" in kwargs:
                    kwargs = {**kwargs, "device": torch.device("cpu")}
                values[node] = cast(Any, node.target)(*args, **kwargs)
        return values[node]

    try:
        result = value(index)
    except LookupError:
        return None
    return cast(torch.Tensor, result)

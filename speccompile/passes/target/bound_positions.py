"""Keeps look-ups by position inside their tables: padding and drafts may stand after the last position there is."""

from __future__ import annotations

import bisect
from dataclasses import dataclass
from typing import Any, ClassVar, cast

import torch
from torch import fx

from speccompile.errors import InvalidOption
from speccompile.graph.step_graph import StepGraph
from speccompile.graph_capture.counted_positions import lookup
from speccompile.passes.base import Changes, Facts, Pass, PassRegion, facts

aten = torch.ops.aten


@dataclass(frozen=True)
class BoundPositions(Pass):
    """Clamps indices of a table (learned positions, stored sines) that are computed only from positions.

    Raises:
        InvalidOption: a sequence of ``max_len`` tokens would read past the table's end.
    """

    name: ClassVar[str] = "bound_positions"
    looks_for: ClassVar[str] = "tables indexed by position"
    region: ClassVar[PassRegion] = "model"
    requires: ClassVar[Facts] = facts("captured")
    provides: ClassVar[Facts] = facts("positions_bounded")
    optional: ClassVar[bool] = True

    def run(self, graph: StepGraph) -> Changes:
        found = [node for node in graph.graph.nodes if node.op == "call_function" and lookup(node) is not None]
        bounded = 0
        for node in found:
            table, index, dim = lookup(node)  # type: ignore[misc]
            if not _from_positions_alone(index, graph.anchors.positions):
                continue
            places = table.meta["val"].shape[dim]
            lengths = range(graph.layout.max_len + 1)
            most = bisect.bisect(lengths, places, key=lambda length: _evaluate(index, graph, length - 1) + 1) - 1
            if most < graph.layout.max_len:
                raise InvalidOption(
                    where="wrap",
                    name="max_len",
                    value=graph.layout.max_len,
                    reason=f"the model's table of positions ends there; use max_len <= {most}",
                )
            inside = graph.insert(lambda index, most: index.clamp(max=most), index, before=node, most=places - 1)
            inside.meta.update({key: node.meta[key] for key in ("layer",) if key in node.meta})
            node.replace_input_with(index, inside)
            bounded += 1
        return Changes(bounded, f"{bounded} look-ups by position" if bounded else "no table is indexed by position")


def _ancestors(index: fx.Node) -> set[fx.Node]:
    seen: set[fx.Node] = set()
    stack = [index]
    while stack:
        node = stack.pop()
        if node not in seen:
            seen.add(node)
            stack.extend(node.all_input_nodes)
    return seen


def _from_positions_alone(index: fx.Node, positions: fx.Node) -> bool:
    """Whether the values of ``index`` are computed from positions (sizes may come from anywhere)."""
    within = _ancestors(index)
    read = {
        node
        for node in within
        if node.op == "placeholder"
        and any(user in within and user.target is not aten.sym_size.int for user in node.users)
    }
    return read == {positions} or index is positions


def _evaluate(index: fx.Node, graph: StepGraph, position: int) -> int:
    """The largest value of ``index`` for a step whose tokens all stand at ``position``."""
    needed = _ancestors(index)
    values: dict[fx.Node, Any] = {}
    for node in graph.graph.nodes:
        if node not in needed:
            continue
        if node.op == "placeholder":
            shape = tuple(node.meta["val"].shape)
            values[node] = torch.tensor(position if node is graph.anchors.positions else 0).expand(shape)
        else:
            args = fx.map_arg(node.args, values.__getitem__)
            kwargs = fx.map_arg(node.kwargs, values.__getitem__)
            if "device" in kwargs:
                kwargs = {**kwargs, "device": torch.device("cpu")}
            values[node] = cast(Any, node.target)(*args, **kwargs)
    return int(values[index].max())

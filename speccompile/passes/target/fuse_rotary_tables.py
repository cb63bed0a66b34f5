"""Cosines and sines for rotary embeddings computed by one op."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import fx

import speccompile.ops.rotary_tables  # noqa: F401  defines an op
from speccompile.graph.step_graph import StepGraph
from speccompile.passes.base import Changes, Facts, Pass, PassRegion, facts

aten = torch.ops.aten

_CASTS = (aten.to.dtype, aten.to.device, aten._to_copy.default)


@dataclass(frozen=True)
class FuseRotaryTables(Pass):
    """Computes ``cos(angles) * scaling`` and ``sin(angles) * scaling`` of transformers' rotary embeddings in C++, where
    ``angles`` are positions times frequencies, twice side by side.

    As torch's own ops they take as long as a layer of a small model. Tables of another form stay as they are.
    """

    name: ClassVar[str] = "fuse_rotary_tables"
    looks_for: ClassVar[str] = "cosines and sines of positions"
    region: ClassVar[PassRegion] = "model"
    requires: ClassVar[Facts] = facts("linears_chosen")
    provides: ClassVar[Facts] = facts("rotary_tables_fused")
    optional: ClassVar[bool] = True

    def run(self, graph: StepGraph) -> Changes:
        count = sum(_fuse(graph, node) for node in graph.graph.find_nodes(op="call_function", target=aten.cat.default))
        return Changes(count, f"{count} pairs of tables")


def _fuse(graph: StepGraph, angles: fx.Node) -> bool:
    """Replace both tables of ``angles``; False if they have another form."""
    replaced = [angles]
    read = _positions_and_frequencies(angles, replaced)
    by_op = {user.target: user for user in angles.users}
    if read is None or len(angles.users) != 2 or by_op.keys() != {aten.cos.default, aten.sin.default}:
        return False
    tables = [by_op[op] for op in (aten.cos.default, aten.sin.default)]
    ends, scalings = zip(*map(_scaled, tables), strict=True)
    if len(set(scalings)) > 1:
        return False
    with graph.graph.inserting_before(angles):
        op = torch.ops.speccompile.native_rotary_tables.default
        call = graph.graph.call_function(op, (*read, scalings[0]))
        results = [graph.graph.call_function(operator.getitem, (call, index)) for index in range(2)]
    kept = {key: value for key, value in angles.meta.items() if key in ("layer", "pass")}
    call.meta = kept | {"val": tuple(end.meta["val"] for end in ends)}
    for table, end, result in zip(tables, ends, results, strict=True):
        result.meta = kept | {"val": end.meta["val"]}
        graph.replace(end, result)
        if end is not table:
            graph.graph.erase_node(table)
    for node in replaced:
        if not node.users:
            graph.graph.erase_node(node)
    return True


def _scaled(table: fx.Node) -> tuple[fx.Node, float]:
    """``table`` or its product with a number, and the number."""
    user = next(iter(table.users), None)
    if len(table.users) == 1 and user is not None and user.target is aten.mul.Tensor:
        factor = user.args[1]
        if isinstance(factor, int | float):
            return user, float(factor)
    return table, 1.0


def _positions_and_frequencies(angles: fx.Node, passed: list[fx.Node]) -> tuple[fx.Node, fx.Node] | None:
    """int64 ``[B, T]`` and float32 ``[R / 2]`` of ``cat([p * f, p * f], -1)``."""
    parts, *dim = angles.args
    value = angles.meta["val"]
    if not isinstance(parts, list | tuple) or len(parts) != 2 or parts[0] is not parts[1] or value.ndim != 3:
        return None
    product = parts[0]
    if dim not in ([-1], [2]) or not isinstance(product, fx.Node) or product.target is not aten.mul.Tensor:
        return None
    left, right = product.args
    if not isinstance(left, fx.Node) or not isinstance(right, fx.Node):
        return None
    passed.append(product)
    column, frequencies = _through_casts(left, passed), _through_casts(right, passed)
    if column.target is not aten.unsqueeze.default or column.args[1] not in (2, -1):
        return None
    passed.append(column)
    positions = column.args[0]
    assert isinstance(positions, fx.Node)
    found, factors = positions.meta["val"], frequencies.meta["val"]
    exact = product.meta["val"].dtype == value.dtype == factors.dtype == torch.float32
    fits = found.dtype == torch.int64 and found.ndim == 2 and factors.ndim == 1
    return (positions, frequencies) if exact and fits else None


def _through_casts(node: fx.Node, passed: list[fx.Node]) -> fx.Node:
    """The node before casts to float32, which the op computes itself."""
    while node.target in _CASTS and node.meta["val"].dtype == torch.float32:
        passed.append(node)
        source = node.args[0]
        assert isinstance(source, fx.Node)
        node = source
    return node

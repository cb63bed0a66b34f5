"""Sizes made where they are needed: so that a piece of a graph can be cut out, and equal pieces stay equal."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import fx

from speccompile.errors import AnchorError
from speccompile.graph_capture.graph import StepGraph

aten = torch.ops.aten


def keep_sizes_local(graph: StepGraph) -> None:
    """Let every layer, and what stands outside of the layers, compute the sizes it needs from its own inputs.

    Each size is made in the same way at the start of its region, however export came by it, so that equal layers
    stay equal.
    """
    regions: dict[int | None, list[fx.Node]] = {}
    for node in graph.graph.nodes:
        if node.op == "call_function":
            regions.setdefault(node.meta.get("layer"), []).append(node)
    for layer, nodes in regions.items():
        inside = set(nodes)
        read = dict.fromkeys(x for node in nodes if not _is_size(node) for x in node.all_input_nodes)
        outside = [x for x in read if x not in inside and isinstance(x.meta["val"], torch.Tensor)]
        local = _LocalSizes(graph, graph.placeholders if layer is None else outside, nodes[0])
        for size in [x for x in read if _is_size(x)]:
            size.replace_all_uses_with(local.of(size), delete_user_cb=inside.__contains__)
    # Passes put what feeds the inputs before ``start``, so that has to stay the first reader of one.
    graph.anchors.start = next(node for node in graph.graph.nodes if node.op == "call_function")
    graph.remove_dead_code()


@dataclass
class _LocalSizes:
    """Nodes for sizes, put before ``before`` and computed from ``tensors`` alone."""

    graph: StepGraph
    tensors: list[fx.Node]
    before: fx.Node
    made: dict[int, fx.Node] = field(default_factory=dict)

    def of(self, size: fx.Node) -> fx.Node:
        value = size.meta["val"]
        if value not in self.made:
            self.made[value] = self._dimension(value) or self._product(value) or self._copy(size)
        return self.made[value]

    def _dimension(self, value: int) -> fx.Node | None:
        for tensor in self.tensors:
            if value in (shape := tuple(tensor.meta["val"].shape)):
                return self._call(aten.sym_size.int, (tensor, shape.index(value)), value)
        return None

    def _product(self, value: int) -> fx.Node | None:
        names, rest = factors(value, self.graph.sizes)
        if not names:
            return None
        parts: list[Any] = [] if rest == 1 else [rest]
        for name in names:
            prime = self.graph.sizes[name]
            if prime not in self.made and (dimension := self._dimension(prime)) is not None:
                self.made[prime] = dimension
            if prime not in self.made:
                return None
            parts.append(self.made[prime])
        sizes = [part if isinstance(part, int) else int(part.meta["val"]) for part in parts]
        result, so_far = parts[0], sizes[0]
        for part, number in zip(parts[1:], sizes[1:], strict=True):
            so_far *= number
            result = self._call(operator.mul, (result, part), so_far)
        return cast(fx.Node, result)

    def _copy(self, size: fx.Node) -> fx.Node:
        if size.target is aten.sym_size.int:
            value = size.meta["val"]
            raise AnchorError(anchor=f"the size {size.name!r}", reason=f"no input of its reader is {value} long")
        arguments = {node: self.of(node) for node in size.all_input_nodes}
        args: Any = fx.map_arg(size.args, arguments.__getitem__)
        return self._call(cast(Callable[..., Any], size.target), args, size.meta["val"])

    def _call(self, target: Callable[..., Any], args: tuple[Any, ...], value: int) -> fx.Node:
        with self.graph.graph.inserting_before(self.before):
            node = self.graph.graph.call_function(target, args)
        node.meta = {key: self.before.meta[key] for key in ("pass", "layer") if key in self.before.meta}
        node.meta["val"] = value
        return node


def _is_size(node: fx.Node) -> bool:
    return isinstance(node.meta["val"], int)


def factors(size: int, sizes: Mapping[str, int]) -> tuple[list[str], int]:
    """``size`` as a product of named sizes (B, T: their examples divide no size of the model) and a rest."""
    names = [name for name, prime in sizes.items() if size > 0 and size % prime == 0]
    return names, size // math.prod(sizes[name] for name in names)

"""Sizes computed where they are needed: a part of a graph can then be outlined, and equal parts stay equal."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import fx

from speccompile.errors import AnchorError
from speccompile.graph.step_graph import StepGraph

aten = torch.ops.aten


def keep_sizes_local(graph: StepGraph) -> None:
    """Let every layer, and the nodes outside of the layers, compute the sizes they need from their own inputs.

    Each size is computed in the same way at the start of its region, however export has computed it. So equal layers
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
        sizes = [x for x in read if _is_size(x)]
        if layer is None:
            # A later pass may reduce the positions of the nodes outside of the layers, and with them their sizes.
            sizes = [x for x in sizes if x.meta.get("layer") is not None]
        for size in sizes:
            size.replace_all_uses_with(local.of(size), delete_user_cb=inside.__contains__)
    # Passes insert the nodes that feed the inputs before ``start``, so ``start`` must stay the first reader of one.
    graph.anchors.start = next(node for node in graph.graph.nodes if node.op == "call_function")
    graph.remove_dead_code()


@dataclass
class _LocalSizes:
    """Nodes for sizes, inserted before ``before`` and computed only from ``tensors``."""

    graph: StepGraph
    tensors: list[fx.Node]
    before: fx.Node
    cache: dict[tuple[Any, ...], fx.Node] = field(default_factory=dict)

    def of(self, size: fx.Node) -> fx.Node:
        """A node with the value of ``size``: arithmetic as export left it, over dimensions of ``tensors``."""
        if size.target is aten.sym_size.int:
            return self._dimension(size.meta["val"]) or self._product(size)
        arguments = {node: self.of(node) for node in size.all_input_nodes}
        args: Any = fx.map_arg(size.args, arguments.__getitem__)
        return self._call(cast(Callable[..., Any], size.target), args, size.meta["val"])

    def _dimension(self, value: int) -> fx.Node | None:
        for tensor in self.tensors:
            if value in (shape := tuple(tensor.meta["val"].shape)):
                return self._call(aten.sym_size.int, (tensor, shape.index(value)), value)
        return None

    def _product(self, size: fx.Node) -> fx.Node:
        """A dimension that no input has, for example of a tensor whose rows and tokens were flattened."""
        value = size.meta["val"]
        names, rest = factors(value, self.graph.sizes)
        parts = [self._dimension(self.graph.sizes[name]) for name in names]
        if not parts or None in parts:
            raise AnchorError(anchor=f"the size {size.name!r}", reason=f"no input of its reader is {value} long")
        result = cast(fx.Node, parts[0])
        for factor in (*parts[1:], rest):
            number = factor if isinstance(factor, int) else cast(fx.Node, factor).meta["val"]
            if number != 1:
                result = self._call(operator.mul, (result, factor), result.meta["val"] * number)
        return result

    def _call(self, target: Callable[..., Any], args: tuple[Any, ...], value: int) -> fx.Node:
        key = (target, *args)
        if key not in self.cache:
            with self.graph.graph.inserting_before(self.before):
                self.cache[key] = self.graph.graph.call_function(target, args)
            kept = {name: known for name, known in self.before.meta.items() if name in ("pass", "layer")}
            self.cache[key].meta = {**kept, "val": value}
        return self.cache[key]


def _is_size(node: fx.Node) -> bool:
    return isinstance(node.meta["val"], int)


def factors(size: int, sizes: Mapping[str, int]) -> tuple[list[str], int]:
    """``size`` as a product of named sizes (B, T: their examples divide no size of the model) and a rest."""
    names = [name for name, prime in sizes.items() if size > 0 and size % prime == 0]
    return names, size // math.prod(sizes[name] for name in names)

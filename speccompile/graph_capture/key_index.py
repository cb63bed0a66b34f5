"""Sparse attention by an index. A layer keeps a small key of each token beside its KV, and a query attends to the
tokens whose small keys have the best scores.

The model's own code scores all positions and chooses the best ones, for each of the T tokens of a step. The number of
chosen positions is the minimum of a constant and the cache's length, which varies.
"""

from __future__ import annotations

import builtins
import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import fx, nn

from speccompile.graph_capture.anchors import ModulePaths, layer_of
from speccompile.graph_capture.recurrence import names_of_files

aten = torch.ops.aten


@contextlib.contextmanager
def symbolic_counts(model: nn.Module) -> Iterator[None]:
    """Let ``min`` of a symbolic size be symbolic in the files of ``model``, in this context.

    Python's own ``min`` would compare the size with the constant, which would limit the capture to longer caches.
    """
    files = [names for names in names_of_files(model) if "min" not in names]
    try:
        for names in files:
            names["min"] = _smallest
        yield
    finally:
        for names in files:
            del names["min"]


def share_choices(graph: fx.Graph, paths: ModulePaths) -> None:
    """Move choices that later layers also use out of the layer that computes them, with all nodes that they depend on.
    They are placed before that layer, since later layers may only read its hidden states.
    """
    layers: dict[int, list[fx.Node]] = {}
    for node in graph.nodes:
        layer = layer_of(node, paths) if node.op == "call_function" else None
        if layer is not None:
            layers.setdefault(layer, []).append(node)
    for layer, nodes in layers.items():
        shared = needed_for({node for node in nodes if _is_choice(node) and _is_read_after(node, layer, paths)})
        first = next(node for node in nodes if node not in shared)
        for node in nodes:
            if node in shared:
                first.prepend(node)
                del node.meta["nn_module_stack"]


def _is_choice(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and not value.is_floating_point()


def _is_read_after(node: fx.Node, layer: int, paths: ModulePaths) -> bool:
    return any(layer_of(user, paths) not in (layer, None) for user in node.users)


def needed_for(nodes: set[fx.Node]) -> set[fx.Node]:
    """Return ``nodes``, and all nodes that they are computed from. This includes writes to state, and the other results
    of ops that have several."""
    found, left = set[fx.Node](), list(nodes)
    while left:
        node = left.pop()
        if node not in found:
            found.add(node)
            # Export may read the cache's length from the state of any layer, whose writes do not change it.
            left += [] if _is_size_of_input(node) else node.all_input_nodes
            if isinstance(node.meta.get("val"), list | tuple):
                left += node.users
            left += [user for user in node.users if user.target is aten.index_put_.default and user.args[0] is node]
    return found


def _is_size_of_input(node: fx.Node) -> bool:
    return node.target is aten.sym_size.int and node.all_input_nodes[0].op == "placeholder"


def _smallest(*values: Any, **options: Any) -> Any:
    if len(values) == 2 and any(isinstance(value, torch.SymInt) for value in values):
        return torch.sym_min(*values)
    return builtins.min(*values, **options)

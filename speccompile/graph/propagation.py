"""Fake propagation: shapes, dtypes and strides of a graph's nodes, recomputed for changed nodes.

``meta["val"]`` of a node is its fake result. ``meta["seen"]`` is the target and arguments that it was computed from.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import fx

from speccompile.graph.body import Body
from speccompile.graph.fakes import fake, faking, kind, result_of
from speccompile.graph.port import Port
from speccompile.utils.torch_logs import without_log
from speccompile.utils.torch_private import FAKE_TENSOR_LOG, OpOverload


def propagate(graph: fx.Graph, ports: Mapping[str, Port], bodies: Mapping[str, Body], device: torch.device) -> None:
    """Recompute the fake results of new and changed nodes, and of the nodes that depend on them."""
    with without_log(FAKE_TENSOR_LOG), faking():
        fresh: set[fx.Node] = set()
        for node in graph.nodes:
            if node.op == "output":
                continue
            old = node.meta.get("val")
            if node.op == "placeholder":
                port = ports[node.name]
                same = old is not None and (tuple(old.shape), old.dtype) == (port.shape, port.dtype)
                value = old if same else fake(port.shape, port.dtype, device)
            elif is_current(node) and (not fresh or fresh.isdisjoint(node.all_input_nodes)):
                continue
            else:
                value = fake_call(node, bodies)
                same = _is_same(value, old)
            if not same:
                fresh.add(node)
            node.meta["val"] = value
            mark_current(node)


def fake_call(node: fx.Node, bodies: Mapping[str, Body]) -> Any:
    """The fake result of ``node``, computed from the fake results of its arguments."""
    args = fx.map_arg(node.args, lambda item: item.meta["val"])
    kwargs = fx.map_arg(node.kwargs, lambda item: item.meta["val"])
    if node.op == "call_module":
        return bodies[str(node.target)].fake(cast(Any, args))
    if isinstance(node.target, OpOverload):
        return result_of(node.target, args, kwargs)
    return cast(Any, node.target)(*args, **kwargs)


def is_current(node: fx.Node) -> bool:
    """Whether ``meta["val"]`` was computed from the node's present target and arguments."""
    seen = node.meta.get("seen")
    return seen is not None and seen[0] is node.target and seen[1] is node.args and seen[2] is node.kwargs


def mark_current(node: fx.Node) -> None:
    """Record that ``meta["val"]`` was computed from the node's present target and arguments."""
    node.meta["seen"] = (node.target, node.args, node.kwargs)


def _is_same(new: Any, old: Any) -> bool:
    """Whether ops that read either result return the same shapes, dtypes and strides."""
    if isinstance(new, list | tuple):
        return type(new) is type(old) and len(new) == len(old) and all(map(_is_same, new, old))
    if not (isinstance(new, torch.Tensor) and isinstance(old, torch.Tensor)):
        return type(new) is type(old) is int and new == old
    return kind(new) == kind(old)

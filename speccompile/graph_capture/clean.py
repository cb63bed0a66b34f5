"""Removal of ops without effect from an exported graph, and rewriting of linears to their usual form."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import fx

aten = torch.ops.aten


def clean_graph(graph: fx.Graph) -> None:
    """Remove export's own checks, and casts and slices without effect. A product with a transposed input or weight
    becomes a linear."""
    for node in list(graph.nodes):
        if node.op != "call_function":
            continue
        if node.target in (aten._assert_tensor_metadata.default, aten._assert_scalar.default):
            graph.erase_node(node)
        elif node.target is aten.index_put_.default and node.args[0].op == "placeholder":
            # The write returns the state itself. A layer that shares another layer's KV reads this result.
            node.replace_all_uses_with(node.args[0])
        elif _changes_nothing(node):
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)
        elif node.target is aten.matmul.default and _is_transposed_linear(node):
            weight, columns = cast("tuple[fx.Node, fx.Node]", node.args)
            with graph.inserting_before(node):
                linear = _noted(graph.call_function(aten.linear.default, (columns.args[0], weight)), node)
                rows = _noted(graph.call_function(aten.transpose.int, (linear, 1, 2)), node)
            node.replace_all_uses_with(rows)
            graph.erase_node(node)
        elif node.target is aten.matmul.default and (matrix := _transposed_weight(node.args[1])) is not None:
            with graph.inserting_before(node):
                linear = _noted(graph.call_function(aten.linear.default, (node.args[0], matrix)), node)
            node.replace_all_uses_with(linear)
            graph.erase_node(node)
    _free_unread_inputs(graph)
    graph.eliminate_dead_code()


def _free_unread_inputs(graph: fx.Graph) -> None:
    """Read each size from the first input that has it, if export reads it from an input that is not used otherwise.

    Export chooses any input of that size (torch 2.11), also one that only recurrent models need.
    """
    inputs = [node for node in graph.nodes if node.op == "placeholder" and isinstance(node.meta["val"], torch.Tensor)]
    first: dict[Any, tuple[fx.Node, int]] = {}
    for node in inputs:
        for dim, size in enumerate(node.meta["val"].shape):
            if isinstance(size, torch.SymInt):
                first.setdefault(size.node.expr, (node, dim))
    for unread in inputs:
        if all(user.target is aten.sym_size.int for user in unread.users):
            for user in list(unread.users):
                size = unread.meta["val"].shape[cast(int, user.args[1])]
                user.args = first[size.node.expr]


def _is_transposed_linear(node: fx.Node) -> bool:
    """Whether ``node`` is ``weight [O, I] @ x.transpose(1, 2)`` for ``x [B, T, I]``, as in Mamba's time steps."""
    args: tuple[Any, ...] = node.args
    weight, columns = args
    return (
        isinstance(weight, fx.Node)
        and isinstance(columns, fx.Node)
        and weight.op == "placeholder"
        and weight.meta["val"].dim() == 2
        and columns.target is aten.transpose.int
        and columns.meta["val"].dim() == 3
        and columns.args[1:] in ((1, 2), (2, 1), (-1, -2), (-2, -1))
    )


def _transposed_weight(node: Any) -> fx.Node | None:
    """Return the weight ``[O, I]`` that ``node`` transposes, or None. Falcon's layers multiply with ``weight.T``."""
    if not isinstance(node, fx.Node) or node.target not in (aten.numpy_T.default, aten.t.default):
        return None
    (weight,) = cast("tuple[fx.Node]", node.args)
    return weight if weight.op == "placeholder" and weight.meta["val"].dim() == 2 else None


def _noted(new: fx.Node, old: fx.Node) -> fx.Node:
    """Copy the metadata of ``old``, except its value, to ``new``."""
    new.meta = {name: value for name, value in old.meta.items() if name != "val"}
    new.meta["val"] = new.target(*[arg.meta["val"] if isinstance(arg, fx.Node) else arg for arg in new.args])  # type: ignore[operator]
    return new


def _changes_nothing(node: fx.Node) -> bool:
    args: tuple[Any, ...] = node.args
    if node.target in (aten.to.dtype, aten.to.device, aten.to.dtype_layout):
        before, after = args[0].meta["val"], node.meta["val"]
        return bool(before.dtype == after.dtype and before.device == after.device)
    if node.target is aten.slice.Tensor:
        # The slice removes nothing: it has all positions, or as many from the end as exist.
        return len(args) < 5 and bool(args[0].meta["val"].shape == node.meta["val"].shape)
    return False

"""Rotary position embeddings, the write of keys and values, and attention run as one op."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, TypeGuard

import torch
from torch import fx

import speccompile.ops.rotary_attention  # noqa: F401  defines an op
from speccompile.graph.step_graph import StepGraph
from speccompile.passes.base import Changes, Facts, Pass, PassRegion, facts

aten = torch.ops.aten

#: Numbers of the dimensions that a captured model exchanges, and what a slice without an end has.
_PLACES, _HEADS, _FEATURES, _END = 1, 2, 3, 2**63 - 1


@dataclass(frozen=True)
class FuseRotaryAttention(Pass):
    """Rotates queries and keys in the attention op, which also writes keys and values into the cache.

    It matches ``x * cos + rotate_half(x) * sin`` of transformers, over all or the first features of a head. Layers with
    another form (interleaved, without positions, with keys of another layer) stay as they are.
    """

    name: ClassVar[str] = "fuse_rotary_attention"
    looks_for: ClassVar[str] = "rotary embeddings before native_attention"
    region: ClassVar[PassRegion] = "model"
    requires: ClassVar[Facts] = facts("attention_chosen")
    provides: ClassVar[Facts] = facts("rotary_fused")
    optional: ClassVar[bool] = True

    def run(self, graph: StepGraph) -> Changes:
        calls = graph.graph.find_nodes(op="call_function", target=torch.ops.speccompile.native_attention.default)
        order = {node: place for place, node in enumerate(graph.graph.nodes)}
        fused = sum(_fuse(graph, call, order) for call in calls)
        return Changes(fused, f"{fused} of {len(calls)} calls of attention")


@dataclass(frozen=True)
class _Rotation:
    """``x`` rotated by ``cos`` and ``sin`` ``[B, T, R]``; ``nodes`` compute it."""

    x: fx.Node
    cos: fx.Node
    sin: fx.Node
    nodes: tuple[fx.Node, ...]


def _fuse(graph: StepGraph, call: fx.Node, order: dict[fx.Node, int]) -> bool:
    queries, k_cache, v_cache, slots, positions, *rest = call.args
    assert isinstance(queries, fx.Node) and isinstance(k_cache, fx.Node) and isinstance(v_cache, fx.Node)
    writes = [_write(cache, call, slots, positions, order) for cache in (k_cache, v_cache)]
    if not call.users or writes[0] is None or writes[1] is None:
        return False
    keys, values = (_unrounded(write.args[2], queries) for write in writes if write is not None)
    q, k = _rotation(queries), _rotation(keys)
    if q is None or k is None or (q.cos, q.sin) != (k.cos, k.sin):
        return False
    for read in ((q.x, k.x, values, q.cos, q.sin), (k_cache, v_cache)):
        if len({node.meta["val"].dtype for node in read}) > 1:
            return False
    with graph.graph.inserting_before(call):
        given = [_by_place(graph, item, source) for item, source in ((q, queries), (k, keys))]
        arguments = (*given, values, q.cos, q.sin, k_cache, v_cache, slots, positions, *rest)
        new = graph.graph.call_function(
            torch.ops.speccompile.native_rotary_attention.default, arguments, dict(call.kwargs)
        )
    for node in (*given, new):
        if node not in order:
            order[node] = order[call]
            node.meta = {key: value for key, value in call.meta.items() if key in ("layer", "pass")}
    graph.replace(call, new)
    unread = {*q.nodes, *k.nodes}
    for write in filter(None, writes):
        unread.update(write.all_input_nodes)
        graph.graph.erase_node(write)
    for node in sorted(unread, key=order.__getitem__, reverse=True):
        if not node.users and node.op == "call_function":
            graph.graph.erase_node(node)
    return True


def _write(
    cache: fx.Node, call: fx.Node, slots: object, positions: object, order: dict[fx.Node, int]
) -> fx.Node | None:
    """The write of ``call``'s own keys or values; None if anything else uses ``cache`` before ``call``."""
    before = [user for user in cache.users if order[user] < order[call]]
    if len(before) != 1 or before[0].target is not aten.index_put_.default:
        return None
    write = before[0]
    tensor, indices, _, *accumulate = write.args
    assert isinstance(indices, list | tuple)
    if tensor is not cache or write.users or any(accumulate) or len(indices) != 2:
        return None
    rows, at = indices
    own_rows = isinstance(rows, fx.Node) and rows.target is aten.unsqueeze.default and rows.args == (slots, 1)
    return write if own_rows and at is positions else None


def _unrounded(written: object, queries: fx.Node) -> fx.Node:
    """Keys or values before they are rounded to the dtype of the cache, if it is not that of the queries."""
    assert isinstance(written, fx.Node)
    rounds = written.target in (aten.to.dtype, torch.ops.speccompile.round_kv.default)
    rounds = rounds and written.meta["val"].dtype is not queries.meta["val"].dtype
    return _first(written) if rounds else written


def _by_place(graph: StepGraph, rotation: _Rotation, source: fx.Node) -> fx.Node:
    """The input of a rotation, as ``[B, T, heads, D]`` like ``source``."""
    if not _is_flipped(source):
        return rotation.x
    return graph.graph.call_function(aten.transpose.int, (rotation.x, _PLACES, _HEADS))


def _is_flipped(node: fx.Node) -> bool:
    flipped = False
    while _exchanges(node):
        flipped, node = not flipped, _first(node)
    return flipped


def _exchanges(node: fx.Node) -> bool:
    """Whether ``node`` exchanges places and heads."""
    return node.target is aten.transpose.int and {_dim(node.args[1], 4), _dim(node.args[2], 4)} == {_PLACES, _HEADS}


def _first(node: fx.Node) -> fx.Node:
    first = node.args[0]
    assert isinstance(first, fx.Node)
    return first


def _dim(dim: Any, dims: int) -> int:
    return int(dim) % dims


def _rotation(source: fx.Node) -> _Rotation | None:
    """The rotation whose result ``source`` is, which nothing else reads; None if it is not one."""
    flipped = _is_flipped(source)
    nodes = [source]
    while _exchanges(nodes[-1]):
        nodes.append(_first(nodes[-1]))
    found = _over_first_features(nodes[-1]) or _over_all_features(nodes[-1])
    if found is None:
        return None
    chain = [*nodes, *found.nodes]
    if any(len(node.users) > 1 for node in nodes):
        return None
    tables = []
    for table in (found.cos, found.sin):
        # [B, 1, T, R] beside [B, H, T, R], or [B, T, 1, R] beside [B, T, H, R].
        if table.target is not aten.unsqueeze.default or _dim(table.args[1], 4) != (1 if flipped else 2):
            return None
        chain.append(table)
        tables.append(_first(table))
    x = found.x.meta["val"]
    rows, places = x.shape[0], x.shape[2 if flipped else 1]
    for table in tables:
        shape = table.meta["val"].shape
        if len(shape) != 3 or [str(size) for size in shape[:2]] != [str(rows), str(places)]:
            return None
    return _Rotation(found.x, tables[0], tables[1], tuple(dict.fromkeys(chain)))


def _over_all_features(node: fx.Node) -> _Rotation | None:
    """``x * cos + rotate_half(x) * sin``."""
    if node.target is not aten.add.Tensor or node.kwargs:
        return None
    for plain, turned in (node.args, node.args[::-1]):
        if not (_is_product(plain) and _is_product(turned)):
            continue
        for half, sin in (turned.args, turned.args[::-1]):
            x, nodes = _half_turned(half)
            if x is None or x not in plain.args:
                continue
            cos = plain.args[1] if plain.args[0] is x else plain.args[0]
            if isinstance(cos, fx.Node) and isinstance(sin, fx.Node):
                return _Rotation(x, cos, sin, (node, plain, turned, *nodes))
    return None


def _is_product(node: Any) -> TypeGuard[fx.Node]:
    return isinstance(node, fx.Node) and node.target is aten.mul.Tensor


def _half_turned(node: Any) -> tuple[fx.Node | None, tuple[fx.Node, ...]]:
    """``x`` of ``cat([-x[..., half:], x[..., :half]], -1)``, and the nodes of this."""
    parts = _joined(node)
    if parts is None or parts[0].target is not aten.neg.default:
        return None, ()
    high, low = _first(parts[0]), parts[1]
    x = _first(low) if _is_slice(low) else None
    if x is None or not _is_slice(high) or _first(high) is not x:
        return None, ()
    size = x.meta["val"].shape[-1]
    if size % 2 or _bounds(low, size) != (0, size // 2) or _bounds(high, size) != (size // 2, size):
        return None, ()
    return x, (node, parts[0], high, low)


def _over_first_features(node: fx.Node) -> _Rotation | None:
    """``cat([x[..., :R] * cos + rotate_half(x[..., :R]) * sin, x[..., R:]], -1)``."""
    parts = _joined(node)
    found = None if parts is None else _over_all_features(parts[0])
    if parts is None or found is None or not _is_slice(parts[1]):
        return None
    whole = _first(parts[1])
    size, rotated = whole.meta["val"].shape[-1], found.x.meta["val"].shape[-1]
    # A model with this code may rotate all features: then the second part is empty, and the first an alias.
    first = (_is_slice(found.x) and _bounds(found.x, size) == (0, rotated)) or found.x.target is aten.alias.default
    if not first or _first(found.x) is not whole or _bounds(parts[1], size) != (rotated, size):
        return None
    return _Rotation(whole, found.cos, found.sin, (node, *found.nodes, found.x, parts[1]))


def _joined(node: Any) -> list[fx.Node] | None:
    """Both tensors that ``node`` joins along the features."""
    if not isinstance(node, fx.Node) or node.target is not aten.cat.default or len(node.args) != 2:
        return None
    parts, dim = node.args
    assert isinstance(parts, list | tuple)
    both = [part for part in parts if isinstance(part, fx.Node)]
    return both if len(both) == len(parts) == 2 and _dim(dim, 4) == _FEATURES else None


def _is_slice(node: fx.Node) -> bool:
    """Whether ``node`` is a range of features."""
    return node.target is aten.slice.Tensor and len(node.args) == 4 and _dim(node.args[1], 4) == _FEATURES


def _bounds(node: fx.Node, size: int) -> tuple[Any, Any]:
    begin, end = node.args[2:]
    return begin or 0, size if end in (None, _END) else end

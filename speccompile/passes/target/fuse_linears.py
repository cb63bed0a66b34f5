"""Linears run as one op with the norm or the gate before them and the residual addition after them."""

from __future__ import annotations

import operator
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import fx

from speccompile.graph.step_graph import StepGraph
from speccompile.ops.cpu.forms import FORMS
from speccompile.ops.cpu.forms.base import Form
from speccompile.passes.base import Changes, Facts, Pass, PassRegion, facts
from speccompile.utils.torch_private import OpOverload

aten = torch.ops.aten

_CASTS = (aten.to.dtype, aten._to_copy.default, aten.type_as.default)
_ONE, _SEVERAL = ({getattr(form, name): form for form in FORMS.values()} for name in ("linear", "linears"))


@dataclass(frozen=True)
class _Ends:
    """The computation around linears (:func:`speccompile.ops.fused_linears.linear_input`), as nodes."""

    x: fx.Node
    gate: fx.Node | None = None
    activation: str = ""
    norm: fx.Node | None = None
    eps: float = 0.0
    offset: float = 0.0
    #: The nodes that the op replaces.
    replaced: tuple[fx.Node, ...] = field(default=(), compare=False)


@dataclass(frozen=True)
class FuseLinears(Pass):
    """Joins packed linears into one op with the norm (of Llama's or Gemma's kind) or the gate that computes their
    input, and with the residual that is added to the output of a single one.

    A norm or a gate that another node reads too (an adapter) becomes an op with the same bits, ``prepare_rows``.
    As separate kernels, the ops around a product cost some microseconds each, on one thread, in every layer.
    """

    name: ClassVar[str] = "fuse_linears"
    looks_for: ClassVar[str] = "norms, gates and residuals around packed linears"
    region: ClassVar[PassRegion] = "model"
    requires: ClassVar[Facts] = facts("linears_chosen")
    provides: ClassVar[Facts] = facts("linears_fused")
    optional: ClassVar[bool] = True

    def run(self, graph: StepGraph) -> Changes:
        kept = {*graph.values.values(), graph.anchors.final_norm, graph.anchors.lm_head}
        counts = dict.fromkeys(("norms", "gates", "residuals"), 0)
        fused = 0
        for node in list(graph.graph.nodes):
            form = _ONE.get(node.target) or _SEVERAL.get(node.target)
            if form is None or node in kept:
                continue
            ends = _input_of(node, kept)
            added = _residual_of(node)
            if not ends.replaced and added is None:
                continue
            _fuse(graph, node, form, ends, added)
            fused += 1
            counts["norms"] += ends.norm is not None
            counts["gates"] += ends.gate is not None
            counts["residuals"] += added is not None
        apart = _prepare_others(graph, kept) + _join_rows(graph, kept)
        parts = ", ".join(f"{count} {name}" for name, count in counts.items() if count)
        notes = [f"{fused} ops with {parts}"] * bool(fused) + [f"{apart} inputs that others read"] * bool(apart)
        return Changes(fused + apart, "; ".join(notes))


def _prepare_others(graph: StepGraph, kept: set[fx.Node]) -> int:
    """Compute norms and gates that packed linears and others read by one op each: also the final norm, whose result
    passes can save and read in part."""
    count = 0
    for node in list(graph.graph.nodes):
        if node.target not in _ONE and node.target not in _SEVERAL:
            continue
        x = node.args[0]
        for ends in (_norm(x), _gate(x)):
            inside = set() if ends is None else {*ends.replaced} - {x}
            if ends is None or not _is_closed(tuple(inside), {x}, kept):
                continue
            read = (ends.x, ends.gate, ends.activation, ends.norm, ends.eps, ends.offset)
            _put(graph, torch.ops.speccompile.prepare_rows.default, read, x, inside)
            count += 1
            break
    return count


def _join_rows(graph: StepGraph, kept: set[fx.Node]) -> int:
    """Compute inputs of packed linears that are two norms side by side (draft heads') by one op each."""
    count = 0
    for node in list(graph.graph.nodes):
        x = node.args[0] if node.target in _ONE or node.target in _SEVERAL else None
        parts = _side_by_side(x) if isinstance(x, fx.Node) and x not in kept else []
        ends = [found for found in map(_norm, parts) if found is not None]
        if x is None or len(ends) != 2 or len({(end.eps, end.offset) for end in ends}) > 1:
            continue
        inside = {node for end in ends for node in end.replaced}
        if not _is_closed(tuple(inside), {x}, kept):
            continue
        first, second = ends
        read = (first.x, first.norm, second.x, second.norm, first.eps, first.offset)
        _put(graph, torch.ops.speccompile.join_rows.default, read, x, inside)
        count += 1
    return count


def _side_by_side(node: fx.Node) -> list[fx.Node]:
    """The two different tensors that ``node`` joins along the last dimension; else nothing."""
    if node.target is not aten.cat.default or len(node.args) != 2:
        return []
    parts, dim = node.args
    assert isinstance(parts, list | tuple)
    both = [part for part in parts if isinstance(part, fx.Node)]
    joined = len(both) == len(set(both)) == 2 and dim in (-1, node.meta["val"].ndim - 1)
    return both if joined else []


def _put(graph: StepGraph, op: OpOverload, read: tuple[Any, ...], x: fx.Node, inside: set[fx.Node]) -> None:
    """Compute ``x`` by ``op`` over ``read``, in the place of the nodes ``inside``."""
    with graph.graph.inserting_before(x):
        new = graph.graph.call_function(op, read)
    new.meta = {key: value for key, value in x.meta.items() if key in ("layer", "pass", "val")}
    graph.replace(x, new)
    _erase(graph, inside)


def _erase(graph: StepGraph, nodes: set[fx.Node]) -> None:
    for node in reversed([node for node in graph.graph.nodes if node in nodes]):
        graph.graph.erase_node(node)


def _input_of(linear: fx.Node, kept: set[fx.Node]) -> _Ends:
    """The norm or the gate that computes the input of ``linear``, and that nothing else reads."""
    x = linear.args[0]
    assert isinstance(x, fx.Node)
    for found in (_norm(x), _gate(x)):
        if found is not None and _is_closed(found.replaced, {linear}, kept):
            return found
    return _Ends(x)


def _is_closed(nodes: tuple[fx.Node, ...], readers: set[fx.Node], kept: set[fx.Node]) -> bool:
    inside = {*nodes, *readers}
    return not any(node in kept for node in nodes) and all(inside.issuperset(node.users) for node in nodes)


def _residual_of(linear: fx.Node) -> tuple[fx.Node, fx.Node] | None:
    """The addition to the output of a single ``linear``, and what is added."""
    if linear.target not in _ONE or len(linear.users) != 1:
        return None
    add = next(iter(linear.users))
    if add.target is not aten.add.Tensor or add.kwargs:
        return None
    other = add.args[1] if add.args[0] is linear else add.args[0]
    if not isinstance(other, fx.Node) or other is linear or not _are_alike(other, linear):
        return None
    return add, other


def _are_alike(node: fx.Node, other: fx.Node) -> bool:
    value, like = node.meta["val"], other.meta["val"]
    return value.shape == like.shape and value.dtype == like.dtype


def _gate(x: fx.Node) -> _Ends | None:
    """``activation(gate) * x``."""
    if x.target is not aten.mul.Tensor or not all(isinstance(node, fx.Node) for node in x.args):
        return None
    for opened, other in (x.args, x.args[::-1]):
        assert isinstance(opened, fx.Node) and isinstance(other, fx.Node)
        activation = _activation(opened)
        if activation and opened is not other and _are_alike(opened, x) and _are_alike(other, x):
            gate = opened.args[0]
            assert isinstance(gate, fx.Node)
            return _Ends(other, gate=gate, activation=activation, replaced=(x, opened))
    return None


def _activation(node: fx.Node) -> str:
    if node.target is aten.silu.default:
        return "silu"
    if node.target is aten.gelu.default:
        return "gelu_tanh" if node.kwargs.get("approximate", "none") == "tanh" else "gelu"
    return ""


def _norm(x: fx.Node) -> _Ends | None:
    """``x / sqrt(mean(x^2) + eps)`` times a weight, or times 1 plus a weight."""
    replaced: list[fx.Node] = []
    product = _through_casts(x, replaced)
    if product.target is not aten.mul.Tensor or not all(isinstance(node, fx.Node) for node in product.args):
        return None
    replaced.append(product)
    for weight, scaled in (product.args, product.args[::-1]):
        own: list[fx.Node] = []
        assert isinstance(weight, fx.Node) and isinstance(scaled, fx.Node)
        norm, offset = _weight(weight, own)
        scaled_wide = _through_casts(scaled, own)
        hidden = _normalised(scaled_wide, own)
        if norm is None or hidden is None:
            continue
        source, eps = hidden
        wide = source.meta["val"].dtype != torch.float32
        # In half precision Llama's kind rounds before it multiplies with the weight, Gemma's after it.
        rounds_first = wide and scaled.meta["val"].dtype == source.meta["val"].dtype
        fits = not wide or rounds_first == (offset == 0)
        if fits and _are_alike(source, x) and norm.meta["val"].dtype == source.meta["val"].dtype:
            return _Ends(source, norm=norm, eps=eps, offset=offset, replaced=(*replaced, *own))
    return None


def _through_casts(node: fx.Node, passed: list[fx.Node]) -> fx.Node:
    while node.target in _CASTS:
        passed.append(node)
        source = node.args[0]
        assert isinstance(source, fx.Node)
        node = source
    return node


def _weight(node: fx.Node, passed: list[fx.Node]) -> tuple[fx.Node | None, float]:
    """A weight ``[K]``, or ``weight + 1``, and the 1."""
    node = _through_casts(node, passed)
    offset = 0.0
    if node.target is aten.add.Tensor:
        left, right = node.args
        number, source = (left, right) if isinstance(right, fx.Node) else (right, left)
        if not isinstance(number, int | float) or not isinstance(source, fx.Node):
            return None, 0.0
        passed.append(node)
        offset, node = float(number), _through_casts(source, passed)
    is_weight = node.op == "placeholder" and node.meta["val"].ndim == 1
    return (node if is_weight else None), offset


def _normalised(node: fx.Node, passed: list[fx.Node]) -> tuple[fx.Node, float] | None:
    """``h`` and ``eps``, if ``node`` is ``h * rsqrt(mean(h ** 2, -1) + eps)``."""
    if node.target is not aten.mul.Tensor:
        return None
    for given, root in (node.args, node.args[::-1]):
        found = _mean_square(root)
        if found is None or not isinstance(given, fx.Node):
            continue
        squared, eps, nodes = found
        if squared is not given:
            continue
        passed += [node, *nodes]
        source = _through_casts(given, passed)
        return source, eps
    return None


def _mean_square(root: Any) -> tuple[Any, float, list[fx.Node]] | None:
    """``h``, ``eps`` and the nodes, if ``root`` is ``rsqrt(mean(h ** 2, -1, keepdim) + eps)``."""
    if not isinstance(root, fx.Node) or root.target is not aten.rsqrt.default:
        return None
    total = root.args[0]
    if not isinstance(total, fx.Node) or total.target is not aten.add.Tensor:
        return None
    mean, eps = total.args
    if not isinstance(mean, fx.Node) or mean.target is not aten.mean.dim or mean.args[1:] != ([-1], True):
        return None
    power = mean.args[0]
    if not isinstance(power, fx.Node) or power.target is not aten.pow.Tensor_Scalar or power.args[1] != 2:
        return None
    return (power.args[0], float(eps), [root, total, mean, power]) if isinstance(eps, int | float) else None


def _fuse(graph: StepGraph, linear: fx.Node, form: Form, ends: _Ends, added: tuple[fx.Node, fx.Node] | None) -> None:
    last, residual = added or (linear, None)
    # x, then each tensor that stands for the weight, bias, features.
    _, *tensors, biases, features = linear.args
    if linear.target in _ONE:
        tensors, biases, features = [[tensor] for tensor in tensors], [] if biases is None else [biases], [features]
    read = (ends.x, ends.gate, ends.activation, ends.norm, ends.eps, ends.offset, residual)
    meta = {key: value for key, value in linear.meta.items() if key in ("layer", "pass")}
    with graph.graph.inserting_before(last):
        whole = graph.graph.call_function(form.fused, (*read, *tensors, biases, features))
        whole.meta = dict(meta)
        new = whole
        if linear.target in _ONE:
            new = graph.graph.call_function(operator.getitem, (whole, 0))
            new.meta = dict(meta)
    new.meta["val"] = last.meta["val"]
    if last is not linear:
        graph.replace(last, new)
        graph.graph.erase_node(linear)
    else:
        graph.replace(linear, new)
    _erase(graph, set(ends.replaced))

"""Choice of the kernel for the linears of chosen experts, and the form of their weights."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import fx

import speccompile.ops  # noqa: F401  defines the ops
from speccompile.errors import InvalidOption
from speccompile.graph.port import Port
from speccompile.graph.step_graph import StepGraph
from speccompile.graph.verify import views_of
from speccompile.ops.cpu.packing import Pack, WeightPacks
from speccompile.passes.base import Changes, Facts, Pass, PassRegion, facts
from speccompile.passes.target.choose_native import choose_native
from speccompile.passes.target.pack_ports import is_dense, pack_ports

ops = torch.ops.speccompile


@dataclass(frozen=True)
class ChooseExperts(Pass):
    """``native``: the C++ ops, which read the weights of each chosen expert once; else their reference in PyTorch, or
    on CUDA a Triton kernel.

    ``packs`` choose each weight's form, and with ``native`` a form that rounds has C++ ops. Other weights are read as
    the model has them: packed, they would be a second copy of most of it.
    """

    native: bool = False
    packs: WeightPacks = field(default_factory=WeightPacks, compare=False)

    name: ClassVar[str] = "choose_experts"
    looks_for: ClassVar[str] = "speccompile::expert_linear"
    region: ClassVar[PassRegion] = "model"
    requires: ClassVar[Facts] = facts("captured")
    provides: ClassVar[Facts] = facts("experts_chosen")

    def run(self, graph: StepGraph) -> Changes:
        op, native = ops.expert_linear.default, ops.native_expert_linear.default
        packed: list[Pack] = []
        linears = 0
        for weight, calls in _calls_by_weight(graph).items():
            if not self.native:
                self._check_kept(graph.ports[weight.name])
            elif (pack := self._pack(graph, weight, calls)) is not None:
                packed.append(pack)
                linears += len(calls)
        left = graph.graph.find_nodes(op="call_function", target=op)
        ports = {port.name: port for port in (_port_of(graph, call) for call in left) if port is not None}
        chosen = choose_native(graph, {op: native if self.native else op})
        notes = []
        if packed:
            forms = {f"{pack.description} by {pack.form.expert_linear.overloadpacket}" for pack in packed}
            size = sum(pack.nbytes for pack in packed) / 2**20
            notes.append(f"{linears} linears over weights {', '.join(sorted(forms))}, {size:.1f} MiB")
        if left:
            kernel = ops.native_expert_linear if self.native else ops.expert_linear
            size = sum(math.prod(port.shape) * port.dtype.itemsize for port in ports.values()) / 2**20
            notes.append(
                f"{chosen.matched} linears call {kernel}; their weights, {size:.1f} MiB, are the model's own, neither "
                "packed nor rounded"
            )
        return Changes(linears + chosen.matched, "; ".join(notes))

    def _check_kept(self, port: Port) -> None:
        """
        Raises:
            InvalidOption: the options name this weight for a form that rounds.
        """
        form = None if port.path is None else self.packs.named_form(port.path)
        if form is not None and form.rounds:
            reason = f"{port.path} is of experts, and only C++ ops on a CPU read their rounded weights; leave it out"
            raise InvalidOption(where="wrap", name="weights", value=dict(self.packs.forms.modules), reason=reason)

    def _pack(self, graph: StepGraph, weight: fx.Node, calls: list[fx.Node]) -> Pack | None:
        """Let ``calls``, all that read ``weight``, read its pack. None: it keeps its form."""
        port = graph.ports[weight.name]
        values = [_value(call.args[2], weight, port.value) for call in calls]
        transposed = {bool(call.args[4]) for call in calls}
        first = values[0]
        alike = len(transposed) == 1 and all(
            value is not None and (value.data_ptr(), value.shape, value.stride()) == _place(first) for value in values
        )
        # Of a part of a weight the rest would be lost.
        if first is None or not alike or not is_dense(port) or first.numel() != math.prod(port.shape):
            return None
        assert port.path is not None
        is_rounded = self.packs.find_quantized(first) is not None
        if not is_rounded and not self.packs.form_of(port.path, of_vocabulary=False).rounds:
            return None
        pack = self.packs.of(port.path, first.mT if True in transposed else first, transposed=True in transposed)
        parts = pack_ports(graph, port, pack)
        for call in calls:
            x, chosen, _, bias, _ = call.args
            with graph.graph.inserting_before(call):
                arguments = (x, chosen, *parts, bias, pack.features)
                new = graph.graph.call_function(pack.form.expert_linear, arguments)
            new.meta = {key: value for key, value in call.meta.items() if key in ("layer", "pass")}
            graph.replace(call, new)
        _drop(graph, weight)
        if self.packs.freed is not None:
            self.packs.replace_original(port.path, port.release)
        return pack


def _calls_by_weight(graph: StepGraph) -> dict[fx.Node, list[fx.Node]]:
    """The linears that read each weight, directly or by views, of weights that nothing else reads."""
    found = {}
    for node in graph.placeholders:
        if graph.ports[node.name].role == "weight" and graph.ports[node.name].value is not None:
            readers = list(_readers(node))
            if readers and all(_is_weight_of(view, reader) for view, reader in readers):
                found[node] = [reader for _, reader in readers]
    return found


def _readers(node: fx.Node) -> Iterator[tuple[fx.Node, fx.Node]]:
    """The nodes that read ``node`` or views of it, each after what it reads."""
    for user in node.users:
        if node in views_of(user):
            yield from _readers(user)
        else:
            yield node, user


def _is_weight_of(node: fx.Node, linear: fx.Node) -> bool:
    operands = [place for place, argument in enumerate(linear.args) if argument is node]
    return linear.target is ops.expert_linear.default and operands == [2]


def _value(node: object, weight: fx.Node, value: torch.Tensor | None) -> torch.Tensor | None:
    """The part of a weight's ``value`` that ``node``, views of it, has; None if its sizes depend on other nodes."""
    assert isinstance(node, fx.Node)
    if node is weight:
        return None if value is None else value.detach()
    if len(node.all_input_nodes) != 1:
        return None
    source = _value(node.all_input_nodes[0], weight, value)
    if source is None:
        return None
    assert callable(node.target)
    viewed: torch.Tensor = node.target(*fx.map_arg(node.args, lambda _: source), **node.kwargs)
    return viewed


def _place(value: torch.Tensor | None) -> tuple[int, torch.Size, tuple[int, ...]] | None:
    return None if value is None else (value.data_ptr(), value.shape, value.stride())


def _drop(graph: StepGraph, weight: fx.Node) -> None:
    """Remove a weight whose views are not read any more."""
    views = list(weight.users)
    for view in views:
        _drop_view(graph, view)
    graph.drop_placeholder(weight)


def _drop_view(graph: StepGraph, view: fx.Node) -> None:
    for user in list(view.users):
        _drop_view(graph, user)
    graph.graph.erase_node(view)


def _port_of(graph: StepGraph, call: fx.Node) -> Port | None:
    """The port of the weight of ``call``, which it may read by views. A value computed from weights has none."""
    weight = call.args[2]
    while isinstance(weight, fx.Node) and weight.op != "placeholder":
        weight = next(views_of(weight), None)
    return graph.ports[weight.name] if isinstance(weight, fx.Node) else None


def has_experts(graph: StepGraph) -> bool:
    """Whether a captured graph has linears of experts."""
    return bool(graph.graph.find_nodes(op="call_function", target=ops.expert_linear.default))

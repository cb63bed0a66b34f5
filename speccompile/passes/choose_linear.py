"""Which kernel linears become."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import ClassVar

import torch
from torch import fx

import speccompile.lowering.ops.native  # noqa: F401  defines the ops
from speccompile.graph_capture.graph import Port, StepGraph
from speccompile.lowering.cpu.packing import PACKED_DTYPES, WeightPacks
from speccompile.passes.base import Changes, Facts, Pass, facts

aten = torch.ops.aten
ops = torch.ops.speccompile


@dataclass(frozen=True)
class KeepLinears(Pass):
    """Linears run as torch has them."""

    name: ClassVar[str] = "choose_linear"
    looks_for: ClassVar[str] = "linears"
    requires: ClassVar[Facts] = facts("captured")
    provides: ClassVar[Facts] = facts("linears_chosen")
    optional: ClassVar[bool] = True

    def run(self, graph: StepGraph) -> Changes:
        return Changes(0, "stock linears")


@dataclass(frozen=True)
class PackLinears(Pass):
    """Every linear over a weight of the model reads a packed copy of it; an embedding that is tied to one, too.

    A weight that is read in any other way keeps its form, and so do its linears.
    """

    packs: WeightPacks = field(default_factory=WeightPacks, compare=False)

    name: ClassVar[str] = "choose_linear"
    looks_for: ClassVar[str] = "linears"
    requires: ClassVar[Facts] = facts("captured")
    provides: ClassVar[Facts] = facts("linears_chosen")
    # A model may have all of its weights in other forms (experts, say).
    optional: ClassVar[bool] = True

    def run(self, graph: StepGraph) -> Changes:
        done = kept = 0
        for node in graph.placeholders:
            port = graph.ports[node.name]
            users = list(node.users)
            if port.role != "weight" or not any(_is_linear(user, node) for user in users):
                continue
            transposed = {user.target is aten.addmm.default for user in users}
            if len(transposed) > 1 or not all(_can_pack(user, node) for user in users) or not _has_plain_values(port):
                kept += len(users)
                continue
            self._pack(graph, node, port, transposed.pop())
            done += len(users)
        return Changes(done, f"{done} over packed weights" + (f", {kept} stock" if kept else ""))

    def _pack(self, graph: StepGraph, node: fx.Node, port: Port, transposed: bool) -> None:
        assert port.value is not None and port.path is not None
        weight = port.value.detach().t() if transposed else port.value.detach()
        packed = self.packs.of(port.path, weight)
        name = f"{port.name}_packed"
        new_weight = graph.weight(replace(port, name=name, shape=tuple(packed.shape), value=packed, own=True))
        for user in list(node.users):
            with graph.graph.inserting_before(user):
                if user.target is aten.embedding.default:
                    new = graph.graph.call_function(ops.packed_embedding.default, (new_weight, user.args[1]))
                else:
                    x, bias = _operands(user)
                    arguments = (x, new_weight, bias, weight.shape[0])
                    new = graph.graph.call_function(ops.packed_linear.default, arguments)
            new.meta = {key: value for key, value in user.meta.items() if key in ("layer", "pass")}
            graph.replace(user, new)
        graph.drop_placeholder(node)
        if self.packs.consumed is not None:
            self.packs.consumed.take(port.path, packed, weight.shape[0], transposed=transposed)
            port.release()


def _is_linear(user: fx.Node, weight: fx.Node) -> bool:
    if user.target is aten.linear.default:
        return user.args[1] is weight and user.args[0] is not weight
    # A GPT-2 linear: bias + x @ w.
    return user.target is aten.addmm.default and user.args[2] is weight and len(user.args) == 3 and not user.kwargs


def _can_pack(user: fx.Node, weight: fx.Node) -> bool:
    # What else an embedding can be told concerns training alone.
    return _is_linear(user, weight) or (user.target is aten.embedding.default and user.args[0] is weight)


def _operands(linear: fx.Node) -> tuple[fx.Node, fx.Node | None]:
    if linear.target is aten.addmm.default:
        bias, x = linear.args[:2]
    else:
        x, bias = linear.args[0], linear.args[2] if len(linear.args) > 2 else linear.kwargs.get("bias")
    assert isinstance(x, fx.Node) and (bias is None or isinstance(bias, fx.Node))
    return x, bias


def _has_plain_values(port: Port) -> bool:
    # A subclass (quantised weights) computes in its own way.
    plain = type(port.value) in (torch.Tensor, torch.nn.Parameter)
    return plain and port.path is not None and not port.own and len(port.shape) == 2 and port.dtype in PACKED_DTYPES

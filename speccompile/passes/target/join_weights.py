"""Linears that read one input become one product over a joined weight."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar

import torch
from torch import fx

from speccompile.graph.port import Port
from speccompile.graph.step_graph import StepGraph
from speccompile.passes.base import Changes, Facts, Pass, PassRegion, facts
from speccompile.utils.devices import traits_of
from speccompile.utils.joined_weights import JoinedWeights

aten = torch.ops.aten


@dataclass(frozen=True)
class JoinWeights(Pass):
    """Queries, keys and values of a layer become one product, and so do gate and up. Their weights become views of one
    tensor: the model's parameters move in memory, and keep their values. Weights that cannot move stay apart."""

    joined: JoinedWeights = field(default_factory=JoinedWeights, compare=False)

    name: ClassVar[str] = "join_weights"
    looks_for: ClassVar[str] = "linears that read the same input"
    region: ClassVar[PassRegion] = "model"
    requires: ClassVar[Facts] = facts("linears_chosen")
    provides: ClassVar[Facts] = facts("weights_joined")
    # Some models have all of them fused already.
    optional: ClassVar[bool] = True

    def run(self, graph: StepGraph) -> Changes:
        products = linears = 0
        apart: Counter[str] = Counter()
        for group in _groups(graph):
            operands = _operands(graph, group)
            found = (self.joined.refusal(*_paths_and_values(ports)) for ports in operands)
            if (reason := next(filter(None, found), None)) is not None:
                apart[reason] += len(group)
                continue
            _join(graph, group, [self._join(graph, ports) for ports in operands])
            products, linears = products + 1, linears + len(group)
        if linears and not traits_of(graph.device).host_memory:
            # The blocks that the weights had are cached one by one, and no joined tensor fits into one.
            torch.accelerator.empty_cache()
        note = f"{linears} linears in {products} products"
        return Changes(linears, "; ".join([note, *(f"{count} apart: {reason}" for reason, count in apart.items())]))

    def _join(self, graph: StepGraph, ports: Sequence[Port]) -> fx.Node:
        paths, _ = _paths_and_values(ports)
        graphs = [graph] if graph.drafter is None else [graph, graph.drafter]
        read = [port.value for item in graphs for port in item.ports.values() if port.value is not None]
        value = self.joined.join(paths, read)
        name = _name([port.name for port in ports])
        shape = tuple(value.shape)
        return graph.weight(Port(name, "weight", shape, value.dtype, value.device, parts=tuple(paths), value=value))


def _groups(graph: StepGraph) -> list[list[fx.Node]]:
    """Linears of one layer that read one input: all have a bias, or none has."""
    groups: dict[tuple[Any, ...], list[fx.Node]] = {}
    for node in graph.graph.find_nodes(op="call_function", target=aten.linear.default):
        x, *operands = node.args
        read = all(isinstance(item, fx.Node) and item.op == "placeholder" for item in operands)
        if "layer" in node.meta and read and not node.kwargs:
            groups.setdefault((x, len(operands), node.meta["layer"]), []).append(node)
    return [group for group in groups.values() if len(group) > 1]


def _operands(graph: StepGraph, linears: Sequence[fx.Node]) -> list[list[Port]]:
    """Their weights, and their biases if there are any."""
    nodes = zip(*(linear.args[1:] for linear in linears), strict=True)
    return [[graph.ports[node.name] for node in same if isinstance(node, fx.Node)] for same in nodes]


def _paths_and_values(ports: Sequence[Port]) -> tuple[list[str], list[torch.Tensor]]:
    return [str(port.path) for port in ports], [port.value for port in ports if port.value is not None]


def _join(graph: StepGraph, linears: Sequence[fx.Node], operands: Sequence[fx.Node]) -> None:
    first, begin = linears[0], 0
    meta = {key: value for key, value in first.meta.items() if key in ("layer", "pass")}
    with graph.graph.inserting_before(first):
        create = partial(graph.graph.create_node, "call_function")
        whole = create(aten.linear.default, (first.args[0], *operands), name="joined_linear")
        parts = []
        for linear in linears:
            end = begin + linear.meta["val"].shape[-1]
            parts.append(create(aten.slice.Tensor, (whole, -1, begin, end), name=f"{linear.name}_part"))
            begin = end
    for new in (whole, *parts):
        new.meta = dict(meta)
    weights = {item for linear in linears for item in linear.args[1:] if isinstance(item, fx.Node)}
    for linear, part in zip(linears, parts, strict=True):
        graph.replace(linear, part)
    for weight in weights:
        if not weight.users:
            graph.drop_placeholder(weight)


def _name(names: Sequence[str]) -> str:
    """``mlp_gate_up_proj_weight`` of ``mlp_gate_proj_weight`` and ``mlp_up_proj_weight``."""
    words = [name.split("_") for name in names]
    before = _equal_at_start(words)
    after = _equal_at_start([item[before:][::-1] for item in words])
    middle = ["_".join(item[before : len(item) - after]) for item in words]
    return "_".join([*words[0][:before], *filter(None, middle), *words[0][len(words[0]) - after :]])


def _equal_at_start(words: Sequence[Sequence[str]]) -> int:
    same = itertools.takewhile(lambda items: len(set(items)) == 1, zip(*words, strict=False))
    return sum(1 for _ in same)

"""Linears that read one input run as one op: its work is shared out between the threads once."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import fx

from speccompile.graph.step_graph import StepGraph
from speccompile.ops.cpu.forms import FORMS
from speccompile.passes.base import Changes, Facts, Pass, PassRegion, facts
from speccompile.utils.torch_private import OpOverload

#: The op of several linears, by that of one.
JOINED: dict[OpOverload, OpOverload] = {form.linear: form.linears for form in FORMS.values()}


@dataclass(frozen=True)
class JoinLinears(Pass):
    """Queries, keys and values of a layer become one op, and so do gate and up. Each weight stays a separate tensor."""

    name: ClassVar[str] = "join_linears"
    looks_for: ClassVar[str] = "packed linears that read the same input"
    region: ClassVar[PassRegion] = "model"
    requires: ClassVar[Facts] = facts("linears_packed")
    provides: ClassVar[Facts] = facts("linears_chosen")
    # Some models have all of them fused already.
    optional: ClassVar[bool] = True

    def run(self, graph: StepGraph) -> Changes:
        groups: dict[tuple[Any, ...], list[fx.Node]] = {}
        for node in graph.graph.nodes:
            if node.op == "call_function" and node.target in JOINED:
                has_bias = node.args[-2] is not None
                groups.setdefault((node.target, node.args[0], has_bias, node.meta.get("layer")), []).append(node)
        joined = [group for group in groups.values() if len(group) > 1]
        for group in joined:
            _join(graph, group)
        count = sum(map(len, joined))
        return Changes(count, f"{count} linears in {len(joined)} ops")


def _join(graph: StepGraph, linears: list[fx.Node]) -> None:
    first = linears[0]
    # x, then each tensor that stands for the weight, bias, features.
    x, *tensors, biases, features = zip(*(node.args for node in linears), strict=True)
    given = [] if biases[0] is None else list(biases)
    meta = {key: value for key, value in first.meta.items() if key in ("layer", "pass")}
    with graph.graph.inserting_before(first):
        arguments = (x[0], *map(list, tensors), given, list(features))
        whole = graph.graph.call_function(JOINED[first.target], arguments)  # type: ignore[index]
        parts = [graph.graph.call_function(operator.getitem, (whole, index)) for index in range(len(linears))]
    for new in (whole, *parts):
        new.meta = dict(meta)
    for linear, part in zip(linears, parts, strict=True):
        graph.replace(linear, part)

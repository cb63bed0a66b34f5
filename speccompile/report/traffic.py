"""Bytes that each call of a step must read: weights, and the live part of the KV cache."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from speccompile.adapters.buffers import PREFIX
from speccompile.graph.fakes import faking
from speccompile.graph.port import Port
from speccompile.graph.state import Layout
from speccompile.graph.step_graph import StepGraph
from speccompile.graph.verify import views_of, written
from speccompile.ops.cpu.forms.base import COLUMNS, ceil_to
from speccompile.ops.native import ROUNDED
from speccompile.report.regions import is_ours, op_name
from speccompile.utils.torch_private import OpOverload

#: Linears that read only the weights of chosen experts.
_OF_ROUNDED_EXPERTS = frozenset(f"{form}_expert_linear" for form in ROUNDED)
_OF_EXPERTS = frozenset({"expert_linear", "native_expert_linear"}) | _OF_ROUNDED_EXPERTS


@dataclass(frozen=True)
class Reads:
    """Size of the state that a step reads: ``rows`` rows, each with ``context`` tokens."""

    layout: Layout
    rows: int
    context: int

    def of_port(self, port: Port) -> int:
        """Bytes of a placeholder that is read as a whole: a weight, or the live part of a state tensor."""
        nbytes = math.prod(port.shape) * port.dtype.itemsize
        state = self.layout.tensors.get(port.name)
        if port.role == "weight" or state is None:
            return nbytes
        if port.name.startswith(PREFIX):
            # Timed rows are without an adapter.
            return 0
        if state.in_pages:
            return nbytes * self.rows * self.context // (state.shape[0] * state.shape[1])
        slots = self.layout.max_batch + 1
        if not state.shape or state.shape[0] != slots:
            return nbytes
        share = nbytes * self.rows // slots
        return share * self.context // state.shape[1] if state.follows_text else share


def of_step(graph: StepGraph, reads: Reads) -> dict[fx.Node, int]:
    """Bytes of every call of a step. The bytes of a body are those of one call of it."""
    ports = {node: graph.ports[node.name] for node in graph.placeholders}
    calls = [node for node in graph.graph.nodes if node.op == "call_module"]
    values = {node: node.meta.get("val") for node in graph.graph.nodes}
    found = _of_calls(graph, graph.graph, ports, values, reads)
    # The values of equal calls are equal.
    inside: dict[object, Mapping[fx.Node, Any]] = {}
    for call in calls:
        key = call.target, call.all_input_nodes[0].meta["val"].shape
        if key not in inside:
            inside[key] = body_values(graph, call) if _has_experts(graph, call) else {}
        found[call] = sum(of_call(graph, call, reads, inside[key]).values())
    return found


def of_call(graph: StepGraph, call: fx.Node, reads: Reads, values: Mapping[fx.Node, Any]) -> dict[fx.Node, int]:
    """Bytes of every call inside of a body when ``call`` calls it. ``values`` are its :func:`body_values`."""
    body = graph.bodies[str(call.target)].module.graph
    given = zip(body.find_nodes(op="placeholder"), call.args, strict=False)
    ports = {
        inner: graph.ports[outer.name]
        for inner, outer in given
        if isinstance(outer, fx.Node) and outer.name in graph.ports
    }
    return _of_calls(graph, body, ports, values, reads)


def body_values(graph: StepGraph, call: fx.Node) -> dict[fx.Node, Any]:
    """Result of each node of a body when ``call`` calls it, as a fake tensor."""
    runner = _Values(graph.bodies[str(call.target)].module)
    with faking():
        runner.run(*fx.map_arg(call.args, lambda node: node.meta["val"]))
    return runner.found


class _Values(fx.Interpreter):
    """Interpreter that records the result of each node of a body."""

    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module)
        self.found: dict[fx.Node, Any] = {}

    def run_node(self, n: fx.Node) -> Any:
        self.found[n] = super().run_node(n)
        return self.found[n]


def _has_experts(graph: StepGraph, call: fx.Node) -> bool:
    return any(is_ours(node, _OF_EXPERTS) for node in graph.bodies[str(call.target)].module.graph.nodes)


def _of_calls(
    graph: StepGraph, calls: fx.Graph, ports: Mapping[fx.Node, Port], values: Mapping[fx.Node, Any], reads: Reads
) -> dict[fx.Node, int]:
    """Bytes of every function call in ``calls``."""
    # A view reads no bytes. Its bytes count for the calls that read it.
    roots = {node: node for node in ports}
    found = {}
    for node in calls.nodes:
        if node.op != "call_function":
            continue
        if isinstance(node.target, OpOverload) and node.target.is_view:
            found[node] = 0
        else:
            found[node] = _of_node(graph, node, roots, ports, values, reads)
        for source in views_of(node):
            if source in roots:
                roots[node] = roots[source]
    return found


def _of_node(
    graph: StepGraph,
    node: fx.Node,
    roots: Mapping[fx.Node, fx.Node],
    ports: Mapping[fx.Node, Port],
    values: Mapping[fx.Node, Any],
    reads: Reads,
) -> int:
    sources = list(dict.fromkeys(roots[source] for source in node.all_input_nodes if source in roots))
    if "embedding" in op_name(node):
        # Of an embedding's rows only those of the tokens are read.
        weights = [ports[source] for source in sources if ports[source].role == "weight"]
        value = values.get(node)
        features = 1 if value is None else value.shape[-1]
        count = reads.rows if value is None else math.prod(value.shape[:-1])
        return sum(count * features * weight.dtype.itemsize for weight in weights[:1])
    targets = {roots.get(target, target) for target in written(graph, node)}
    nbytes = sum(reads.of_port(ports[source]) for source in sources if source not in targets)
    return _of_chosen(node, nbytes, values) if is_ours(node, _OF_EXPERTS) else nbytes


def _of_chosen(node: fx.Node, nbytes: int, values: Mapping[fx.Node, Any]) -> int:
    """Share of ``nbytes``, those of all experts, for the most experts that the step's tokens can choose."""
    chosen, weight = (values.get(argument) for argument in node.args[1:3] if isinstance(argument, fx.Node))
    if not (isinstance(chosen, torch.Tensor) and isinstance(weight, torch.Tensor)):
        return nbytes
    # Of packed weights the first dimension counts blocks of all experts.
    features: Any = node.args[-1]
    per_expert = ceil_to(features, COLUMNS) // COLUMNS if is_ours(node, _OF_ROUNDED_EXPERTS) else 1
    experts = weight.shape[0] // per_expert
    return nbytes * min(chosen.numel(), experts) // experts

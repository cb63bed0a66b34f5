"""The bytes that each call of a step has to read: weights, and the live part of the KV cache."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from torch import fx

from speccompile.adapters.buffers import PREFIX
from speccompile.graph.port import Port
from speccompile.graph.state import Layout
from speccompile.graph.step_graph import StepGraph
from speccompile.graph.verify import written
from speccompile.report.regions import op_name


@dataclass(frozen=True)
class Reads:
    """How a step reads state: of ``rows`` rows, each with ``context`` tokens."""

    layout: Layout
    rows: int
    context: int

    def of_port(self, port: Port) -> int:
        """Bytes of a placeholder that is read whole: a weight, or the live part of a state tensor."""
        nbytes = math.prod(port.shape) * port.dtype.itemsize
        state = self.layout.tensors.get(port.name)
        if port.role == "weight" or state is None:
            return nbytes
        if port.name.startswith(PREFIX):
            # Rows that are timed have no adapter.
            return 0
        slots = self.layout.max_batch + 1
        if not state.shape or state.shape[0] != slots:
            return nbytes
        share = nbytes * self.rows // slots
        return share * self.context // state.shape[1] if state.follows_text else share


def of_step(graph: StepGraph, reads: Reads) -> dict[fx.Node, int]:
    """Of every call of a step; a body's are those of one call of it."""
    found = {}
    for node in graph.graph.nodes:
        if node.op == "call_module":
            found[node] = sum(of_call(graph, node, reads).values())
        elif node.op == "call_function":
            found[node] = _of_node(graph, node, {name: graph.ports[name] for name in _ports_of(graph, node)}, reads)
    return found


def of_call(graph: StepGraph, call: fx.Node, reads: Reads) -> dict[fx.Node, int]:
    """Of every call inside of a body, where ``call`` calls it."""
    body = graph.bodies[str(call.target)].module.graph
    given = zip(body.find_nodes(op="placeholder"), call.args, strict=False)
    ports = {
        inner.name: graph.ports[outer.name]
        for inner, outer in given
        if isinstance(outer, fx.Node) and outer.name in graph.ports
    }
    return {node: _of_node(graph, node, ports, reads) for node in body.nodes if node.op == "call_function"}


def _ports_of(graph: StepGraph, node: fx.Node) -> Iterator[str]:
    return (source.name for source in node.all_input_nodes if source.name in graph.ports)


def _of_node(graph: StepGraph, node: fx.Node, ports: Mapping[str, Port], reads: Reads) -> int:
    sources = [source for source in node.all_input_nodes if source.op == "placeholder" and source.name in ports]
    if "embedding" in op_name(node):
        # Of its rows only those of the tokens are read.
        weights = [ports[source.name] for source in sources if ports[source.name].role == "weight"]
        value = node.meta.get("val")
        features = 1 if value is None else value.shape[-1]
        count = reads.rows if value is None else math.prod(value.shape[:-1])
        return sum(count * features * weight.dtype.itemsize for weight in weights[:1])
    targets = set(written(graph, node))
    return sum(reads.of_port(ports[source.name]) for source in sources if source not in targets)

"""Joining of two graphs: a drafter's captured network is copied into the target's step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import fx

from speccompile.graph.state import Layout
from speccompile.graph.step_graph import StepGraph

#: The prefix of the names of a drafter's weights, state tensors and bodies.
PREFIX = "drafter_"


def splice_graph(
    graph: StepGraph, other: StepGraph, inputs: Mapping[fx.Node, fx.Node], outputs: Sequence[fx.Node], before: fx.Node
) -> list[fx.Node]:
    """Copy the part of ``other`` that computes ``outputs`` into ``graph``.

    The copy reads weights and state of ``other`` by the same names, and calls its bodies, which must be bodies of
    ``graph``.

    Args:
        inputs: nodes of ``graph`` by nodes of ``other`` (inputs or intermediate nodes). The copy reads them instead,
            and does not compute the nodes of ``other``.
        before: the node of ``graph`` before which the copy is inserted.

    Returns:
        The nodes of ``graph`` that correspond to ``outputs``.

    Raises:
        ValueError: ``outputs`` need an input of ``other`` that is not among ``inputs``.
    """
    needed: set[fx.Node] = set()
    stack = list(outputs)
    while stack:
        node = stack.pop()
        if node not in needed and node not in inputs:
            needed.add(node)
            stack.extend(node.all_input_nodes)
    node_map = dict(inputs)
    for node in other.placeholders:
        if node not in needed:
            continue
        port = other.ports[node.name]
        if port.role == "input":
            raise ValueError(f"the network reads {node.name!r}: give it in inputs")
        node_map[node] = graph.state(node.name) if port.role == "state" else graph.weight(port)
    with graph.graph.inserting_before(before):
        for node in other.graph.nodes:
            if node in needed and node.op != "placeholder":
                node_map[node] = graph.graph.node_copy(node, node_map.__getitem__)
                node_map[node].meta = {}
    graph.propagate()
    return [node_map[node] for node in outputs]


def prefix_names(graph: StepGraph, prefix: str, layout: Layout) -> None:
    """Put ``prefix`` before the names of all weights and state tensors. ``layout`` has the state tensors by the new
    names."""
    ports = {}
    for node in graph.placeholders:
        port = graph.ports[node.name]
        if port.role != "input":
            node._rename(f"{prefix}{port.name}")
            node.target = node.name
            port = replace(port, name=node.name)
        ports[node.name] = port
    graph.ports = ports
    graph.layout = layout


def prefix_bodies(graph: StepGraph, prefix: str) -> None:
    """Put ``prefix`` before the names of all bodies."""
    graph.bodies = {f"{prefix}{name}": replace(body, name=f"{prefix}{name}") for name, body in graph.bodies.items()}
    for node in graph.graph.nodes:
        if node.op == "call_module":
            target: Any = node.target
            node.target = f"{prefix}{target}"

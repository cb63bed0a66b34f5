"""A drafter's network as it reads the nodes of a tree."""

from __future__ import annotations

from speccompile.graph.port import Port
from speccompile.graph.step_graph import StepGraph
from speccompile.passes.target.tree_bodies import SUFFIX

#: Its further inputs, int64 ``[B, T]``: where the KV of each node belongs, and the nodes' parents, as the attention op
#: has them.
PLACES, PARENTS = "places", "parents"


def of_trees(drafter: StepGraph) -> StepGraph:
    """``drafter`` with the forms of its bodies that :class:`~speccompile.passes.target.tree_bodies.AddTreeBodies`
    added, and the inputs that these have besides."""
    graph = drafter.copy()
    positions = graph.ports["position_ids"]
    inputs = []
    for name in (PLACES, PARENTS):
        with graph.graph.inserting_after(graph.placeholders[-1]):
            node = graph.graph.placeholder(name)
        graph.ports[name] = Port(name, "input", positions.shape, positions.dtype, positions.device)
        inputs.append(node)
    for node in graph.graph.nodes:
        if node.op == "call_module":
            node.target = f"{node.target}{SUFFIX}"
            node.args = (*node.args, *inputs)
    return graph

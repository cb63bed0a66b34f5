"""A second form of each body, for steps whose tokens are the nodes of trees."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import fx

import speccompile.ops  # noqa: F401  defines the ops
from speccompile.errors import AnchorError
from speccompile.graph.body import Body
from speccompile.graph.step_graph import StepGraph
from speccompile.passes.base import Changes, Facts, Pass, PassRegion, facts
from speccompile.passes.target.outline import call_of
from speccompile.utils.torch_private import argument_index

#: The end of the names of such bodies.
SUFFIX = "_of_trees"


@dataclass(frozen=True)
class AddTreeBodies(Pass):
    """Adds to each body one that has two more inputs: ``places`` int64 ``[B, T]``, where the KV of the tokens belongs,
    and ``parents`` int64 ``[B, T]``, as the attention op has them. Bodies of chains stay as they are."""

    name: ClassVar[str] = "add_tree_bodies"
    looks_for: ClassVar[str] = "bodies of decoder layers"
    region: ClassVar[PassRegion] = "model"
    requires: ClassVar[Facts] = facts("outlined", "attention_chosen")
    provides: ClassVar[Facts] = facts("tree_bodies")

    def run(self, graph: StepGraph) -> Changes:
        # A drafter's are among the bodies, too.
        called = dict.fromkeys(str(call_of(layer).target) for layer in graph.anchors.layers)
        bodies = {name + SUFFIX: tree_body(graph.bodies[name]) for name in called}
        graph.bodies.update(bodies)
        return Changes(len(bodies), ", ".join(bodies))


def call_tree_bodies(graph: StepGraph, places: fx.Node, parents: fx.Node) -> int:
    """Let the target's layers read trees; returns how many there are."""
    others = {} if graph.drafter is None else graph.drafter.bodies
    layers = {name for name, body in graph.bodies.items() if body.part == "layers" and name not in others}
    calls = [node for node in graph.graph.nodes if node.op == "call_module" and node.target in layers]
    for node in calls:
        node.target = f"{node.target}{SUFFIX}"
        node.args = (*node.args, places, parents)
    return len(calls)


def of_trees(outlined: StepGraph) -> StepGraph:
    """A copy of the outlined model that reads trees. It has two more inputs, ``row_places`` and ``row_parents``, as
    :class:`AddTreeBodies` has them."""
    graph = outlined.copy()
    port = graph.ports["position_ids"]
    call_tree_bodies(graph, *[graph.input(replace(port, name=name)) for name in ("row_places", "row_parents")])
    return graph


def tree_body(body: Body) -> Body:
    """A body that computes the function of ``body`` over trees.

    Raises:
        AnchorError: its layers do not attend by the attention op, or write their KV elsewhere than at its positions.
    """
    inner = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    result = inner.graph_copy(body.module.graph, copies)
    placeholders = [node for node in inner.nodes if node.op == "placeholder"]
    ops = torch.ops.speccompile
    attends = {ops.attention.default, ops.native_attention.default, ops.native_rotary_attention.default}
    calls = [node for node in inner.nodes if node.target in attends]
    if not calls:
        raise AnchorError(anchor=f"attention of {body.name}", reason="trees need layers that call the attention op")
    positions = calls[0].args[argument_index(calls[0].target, "positions")]
    assert isinstance(positions, fx.Node)
    with inner.inserting_after(placeholders[-1]):
        places = inner.placeholder("places")
    with inner.inserting_after(places):
        parents = inner.placeholder("parents")
    for added in (places, parents):
        added.meta = {"val": positions.meta["val"]}
    for node in calls:
        before = argument_index(node.target, "parents")
        given = (*node.args, *[None] * (before - len(node.args)))
        # The op that writes the KV itself knows from the parents where it belongs.
        node.args = (*given[:before], parents, *given[before + 1 :])
    for node in inner.nodes:
        if node.target is torch.ops.aten.index_put_.default:
            tensor, indices, *rest = node.args
            if not (isinstance(tensor, fx.Node) and tensor.op == "placeholder"):
                continue
            written = _at_places(inner, indices, positions, places, node)
            if written == list(indices):
                reason = f"node {node.name} writes at {indices}, not at the positions that its attention has"
                raise AnchorError(anchor=f"KV of {body.name}", reason=reason)
            node.args = (tensor, written, *rest)
    inner.output(result)
    name, size = body.name + SUFFIX, ("B", "T")
    return replace(
        body,
        name=name,
        module=fx.GraphModule(torch.nn.Module(), inner, class_name=name),
        dims=(*body.dims, size, size),
        dtypes=(*body.dtypes, torch.int64, torch.int64),
        key=hashlib.sha256(f"{body.key} of trees".encode()).hexdigest(),
    )


def _at_places(
    graph: fx.Graph, indices: Sequence[fx.Node], positions: fx.Node, places: fx.Node, before: fx.Node
) -> list[fx.Node]:
    """``indices``, computed from ``places`` instead of ``positions``."""
    found = {positions: places}

    def computed(node: fx.Node) -> fx.Node:
        if node not in found:
            inputs = [computed(item) for item in node.all_input_nodes]
            found[node] = node
            if inputs != node.all_input_nodes:
                with graph.inserting_before(before):
                    found[node] = graph.node_copy(node, found.__getitem__)
        return found[node]

    return [computed(index) for index in indices]

"""The ops around the decoder layers as bodies: where a launch costs, Inductor fuses them."""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, ClassVar, cast

import torch
from torch import fx

from speccompile.graph.body import Body, Part
from speccompile.graph.step_graph import StepGraph, Values
from speccompile.graph.verify import views_of, written
from speccompile.passes.base import Changes, Facts, Pass, PassRegion, facts
from speccompile.passes.target.outline import call_of, dims_of, input_name, key_of, result_of
from speccompile.utils.torch_private import OpOverload

#: The fact that a launch costs time: ops outside of the layers are joined.
FEW_LAUNCHES = "few_launches"
#: With fewer calls than this nothing can be fused.
FEWEST_CALLS = 2


@dataclass(frozen=True)
class OutlineEnds(Pass):
    """Moves what the model computes before its first layer (embedding, rotary tables, masks) into the body
    ``prologue``, and what it computes between its last layer and the lm_head (the final norm) into ``epilogue``.

    Rows and width stay symbolic, as in the bodies of layers: one artifact serves all tiers and prompt chunks.
    Sizes, views of a body's inputs, and named values, which a step may have from elsewhere, are computed outside of it.
    """

    name: ClassVar[str] = "outline_ends"
    looks_for: ClassVar[str] = "ops around the decoder layers"
    region: ClassVar[PassRegion] = "model"
    requires: ClassVar[Facts] = facts("outlined")
    provides: ClassVar[Facts] = facts(FEW_LAUNCHES)
    optional: ClassVar[bool] = True

    def run(self, graph: StepGraph) -> Changes:
        layers = set(map(call_of, graph.anchors.layers))
        order = list(graph.graph.nodes)
        places = [place for place, node in enumerate(order) if node in layers]
        before, after = order[: places[0]], order[places[-1] + 1 :]
        read = [node for layer in layers for node in layer.all_input_nodes]
        normed = graph.anchors.final_norm
        named = [node for node in graph.values.values() if node is not normed]
        # Both are found before either is moved.
        found = {
            "prologue": _needed(before, read, without=named),
            "epilogue": _needed(after, [normed], without=named),
        }
        moved = [part for part, nodes in found.items() if _outline(graph, cast(Part, part), nodes)]
        return Changes(len(moved), " and ".join(moved))


def _needed(among: list[fx.Node], results: Iterable[fx.Node], *, without: Iterable[fx.Node] = ()) -> list[fx.Node]:
    """The calls ``among`` these nodes that ``results`` are computed by, in order, less those that are ``without`` or
    that these are computed by."""
    inside, found, stack = set(among), set[fx.Node](), list(results)
    while stack:
        node = stack.pop()
        if node in inside and node not in found and node.op == "call_function":
            found.add(node)
            stack.extend(node.all_input_nodes)
    left_out = [node for node in without if node in found]
    if left_out:
        found.difference_update(_needed(among, left_out))
    return [node for node in among if node in found]


def _outline(graph: StepGraph, part: Part, nodes: list[fx.Node]) -> bool:
    """Whether ``nodes`` became a body."""
    launches = [node for node in nodes if isinstance(node.target, OpOverload) and not node.target.is_view]
    inside, stays = set(nodes), _staying(nodes)
    live_outs = [node for node in nodes if node not in stays and _is_read(node, inside, stays)]
    if len(launches) < FEWEST_CALLS or not live_outs or any(True for node in nodes for _ in written(graph, node)):
        return False
    inputs = list(dict.fromkeys(x for node in nodes for x in node.all_input_nodes if x not in inside))
    graph.bodies[part] = _body(graph, part, nodes, inputs, live_outs)
    results = _call(graph, part, inputs, live_outs, moved=inside - stays)
    new = dict(zip(live_outs, results, strict=True))
    started = graph.anchors.start in inside - stays
    graph.anchors = graph.anchors.mapped(lambda node: new.get(node, node))
    graph.values = Values((name, new.get(node, node)) for name, node in graph.values.items())
    names = [node.name for node in live_outs]
    for node in reversed(nodes):
        if node not in stays:
            graph.graph.erase_node(node)
    for name, node in zip(names, results, strict=True):
        node._rename(name)
    if started:
        graph.anchors.start = next(node for node in graph.graph.nodes if node.op in ("call_function", "call_module"))
    graph.propagate()
    return True


def _call(
    graph: StepGraph, part: Part, inputs: list[fx.Node], live_outs: list[fx.Node], *, moved: set[fx.Node]
) -> list[fx.Node]:
    """Call the body ``part``, and read its results wherever other nodes than the ``moved`` ones read ``live_outs``."""
    readers = {user for node in live_outs for user in node.users if user not in moved}
    first = next(node for node in graph.graph.nodes if node in readers)
    with graph.graph.inserting_before(first):
        call = graph.graph.create_node("call_module", part, tuple(inputs), name=f"{part}_results")
        several = range(len(live_outs) if len(live_outs) > 1 else 0)
        results = [graph.graph.call_function(operator.getitem, (call, index)) for index in several] or [call]
    for node in (call, *results):
        node.meta["pass"] = OutlineEnds.name
    for old, new in zip(live_outs, results, strict=True):
        new.meta["val"] = old.meta["val"]
        old.replace_all_uses_with(new, delete_user_cb=lambda user: user not in moved)
    return results


def _is_read(node: fx.Node, inside: set[fx.Node], stays: set[fx.Node]) -> bool:
    """Whether a body without the nodes that stay outside of it must return ``node``."""
    return any(user not in inside or user in stays for user in node.users)


def _staying(nodes: list[fx.Node]) -> set[fx.Node]:
    """The nodes that are computed outside of a body, too, since it cannot return them: sizes, views of its inputs, and
    views of what it returns already."""
    inside, memory = set(nodes), _memory(nodes)
    read = Counter(memory[node] for node in nodes if any(user not in inside for user in node.users))
    stays: set[fx.Node] = set()
    for node in reversed(nodes):
        own = memory[node]
        returnable = isinstance(node.meta["val"], torch.Tensor) and own in inside and (own is node or read[own] < 2)
        if not returnable and _is_read(node, inside, stays):
            stays.add(node)
    return stays


def _memory(nodes: list[fx.Node]) -> dict[fx.Node, fx.Node]:
    """The node in whose memory each result may lie: the node itself, or the one that it is a view of."""
    found: dict[fx.Node, fx.Node] = {}
    for node in nodes:
        source = next(views_of(node), None)
        copies = node.target is torch.ops.aten.contiguous.default and not _is_contiguous(node.args[0])
        found[node] = node if source is None or copies else found.get(source, source)
    return found


def _is_contiguous(node: Any) -> bool:
    value: torch.Tensor = node.meta["val"]
    return value.is_contiguous()


def _body(graph: StepGraph, part: Part, nodes: list[fx.Node], inputs: list[fx.Node], live_outs: list[fx.Node]) -> Body:
    inner = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in inputs:
        copies[node] = inner.placeholder("hidden" if node in graph.anchors.layers else input_name(node, graph))
        copies[node].meta = {"val": node.meta["val"]}
    for node in nodes:
        copies[node] = inner.node_copy(node, copies.__getitem__)
        copies[node].meta = {}
    returned = [copies[node] for node in live_outs]
    inner.output(returned[0] if len(returned) == 1 else tuple(returned))
    # Of what stays outside the body needs only what its results are computed from.
    inner.eliminate_dead_code()
    return Body(
        name=part,
        module=fx.GraphModule(torch.nn.Module(), inner, class_name=part),
        dims=dims_of(inputs, graph),
        dtypes=tuple(node.meta["val"].dtype for node in inputs),
        results=tuple(result_of(node, graph) for node in live_outs),
        captured=dict(graph.sizes),
        mutates=frozenset(),
        layers=(),
        key=key_of(nodes, inputs, live_outs),
        part=part,
    )

"""Checks of a step graph after every pass: form, ports, mutation, order of reads and writes, shapes."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterator
from typing import NoReturn

import torch
from torch import fx

from speccompile.errors import VerifierError
from speccompile.graph.step_graph import SIZE_OPERATORS, StepGraph
from speccompile.utils.torch_private import OpOverload

aten = torch.ops.aten

Fail = Callable[[str], NoReturn]


def verify(graph: StepGraph, after: str) -> None:
    """Check ``graph`` and recompute its shapes.

    Raises:
        VerifierError: a check fails. The message names the pass ``after`` which the graph was checked, and the node.
    """

    def fail(problem: str) -> NoReturn:
        raise VerifierError(name=after, problem=problem)

    try:
        graph.graph.lint()
    except RuntimeError as error:
        fail(f"the graph is not well formed: {error}")
    _check_ports(graph, fail)
    _check_mutation(graph, fail)
    _check_shapes(graph, fail)


def _check_ports(graph: StepGraph, fail: Fail) -> None:
    names = {node.name for node in graph.placeholders}
    for node in graph.graph.nodes:
        if node.op == "get_attr":
            fail(f"node {node.name!r} reads the attribute {node.target!r}; give its tensor a port (StepGraph.constant)")
        if node.op == "call_module" and node.target not in graph.bodies:
            fail(f"node {node.name!r} calls {node.target!r}, which is not an outlined body")
        known = isinstance(node.target, OpOverload) or node.target in SIZE_OPERATORS
        if node.op == "call_function" and not known:
            fail(f"node {node.name!r} calls {node.target!r}, which is not a torch op")
    if missing := sorted(names - graph.ports.keys()):
        fail(f"placeholders without a port: {', '.join(missing)}")
    if missing := sorted(graph.ports.keys() - names):
        fail(f"ports without a placeholder: {', '.join(missing)}")
    live = set(graph.graph.nodes)
    if lost := sorted(name for name, node in graph.values.items() if node not in live):
        fail(f"named values whose node is gone: {', '.join(lost)}")
    graph.anchors.mapped(lambda node: node if node in live else fail(f"the anchor {node.name!r} is gone"))


@functools.cache
def _aliases(op: OpOverload) -> tuple[tuple[int, str, bool], ...]:
    """The arguments that the result shares memory with, or that the op writes: index, name, and whether it is written.

    The result is cached: reading a schema copies it, and each pass reads the schemas of all nodes.
    """
    arguments = enumerate(op._schema.arguments)
    return tuple((i, item.name, item.alias_info.is_write) for i, item in arguments if item.alias_info is not None)


def written(graph: StepGraph, node: fx.Node) -> Iterator[fx.Node]:
    """The arguments that ``node`` writes in place, by the schema of its op or by its body."""
    if node.op == "call_module":
        for index in graph.bodies[str(node.target)].mutates:
            yield node.args[index]  # type: ignore[misc]
    elif node.op == "call_function" and isinstance(node.target, OpOverload):
        for index, name, is_write in _aliases(node.target):
            if is_write:
                yield from _nodes_of(node, index, name)


def _shares_memory(node: fx.Node) -> bool:
    """Whether :func:`written` or :func:`views_of` can yield an argument. For most ops they cannot."""
    if node.op == "call_function" and isinstance(node.target, OpOverload):
        return bool(_aliases(node.target))
    return node.op != "placeholder"


def views_of(node: fx.Node) -> Iterator[fx.Node]:
    """The arguments that the result of ``node`` shares memory with."""
    if node.target is operator.getitem:
        yield node.args[0]  # type: ignore[misc]
    if node.op == "call_function" and isinstance(node.target, OpOverload):
        for index, name, _ in _aliases(node.target):
            yield from _nodes_of(node, index, name)
        if node.target is aten._unsafe_view.default:
            # Its schema does not declare the memory that it shares.
            yield node.all_input_nodes[0]


def _nodes_of(node: fx.Node, index: int, name: str) -> Iterator[fx.Node]:
    """The nodes in the argument of ``node`` with this index or this name."""
    value = node.args[index] if index < len(node.args) else node.kwargs.get(name)
    for item in value if isinstance(value, list | tuple) else [value]:
        if isinstance(item, fx.Node):
            yield item


def storages_of(graph: StepGraph) -> dict[fx.Node, frozenset[fx.Node]]:
    """The nodes whose memory each node's result may lie in: its own, or those that it is a view of."""
    found: dict[fx.Node, frozenset[fx.Node]] = {}
    for node in graph.graph.nodes:
        sources = [found[source] for source in views_of(node)]
        if node.op == "call_module":
            returned = _returned_inputs(graph.bodies[str(node.target)].module.graph)
            sources += [found[item] for index, item in enumerate(node.args) if index in returned]
        found[node] = frozenset().union(*sources) if sources else frozenset({node})
    return found


def _returned_inputs(body: fx.Graph) -> set[int]:
    """The inputs of a body that its results may be views of."""
    found: dict[fx.Node, frozenset[int]] = {}
    inputs = [node for node in body.nodes if node.op == "placeholder"]
    for node in body.nodes:
        own = frozenset({inputs.index(node)}) if node.op == "placeholder" else frozenset()
        found[node] = own.union(*(found[source] for source in views_of(node)))
    results = body.output_node().all_input_nodes
    return set().union(*(found[node] for node in results))


def state_writes(graph: StepGraph) -> dict[fx.Node, set[str]]:
    """The names of the state tensors that each node writes, also through views."""
    states = {name for name, port in graph.ports.items() if port.role == "state"}
    root: dict[fx.Node, fx.Node] = {node: node for node in graph.placeholders}
    found: dict[fx.Node, set[str]] = {}
    for node in graph.graph.nodes:
        names = {root[target].name for target in written(graph, node) if target in root}
        if written_states := names & states:
            found[node] = written_states
        for source in views_of(node):
            if source in root:
                root[node] = root[source]
    return found


def _check_mutation(graph: StepGraph, fail: Fail) -> None:
    root: dict[fx.Node, fx.Node] = {node: node for node in graph.placeholders}
    writes: dict[fx.Node, int] = {}
    born: dict[fx.Node, int] = {}
    for index, node in enumerate(graph.graph.nodes):
        born[node] = index
        # Before the first write no view can be stale.
        for argument in node.all_input_nodes if writes else ():
            origin = root.get(argument)
            if origin is not None and argument is not origin and born[argument] < writes.get(origin, -1):
                fail(
                    f"node {node.name!r} reads {argument.name!r}, a view of state {origin.name!r} from before "
                    f"a write to that state"
                )
        if not _shares_memory(node):
            continue
        for target in written(graph, node):
            origin = root.get(target)
            if origin is None:
                continue  # a temporary of the step
            if graph.ports[origin.name].role != "state":
                fail(
                    f"node {node.name!r} writes the {graph.ports[origin.name].role} {origin.name!r}; "
                    f"only state can be written"
                )
            writes[origin] = index
        for source in views_of(node):
            if source in root:
                root[node] = root[source]


def _check_shapes(graph: StepGraph, fail: Fail) -> None:
    before = {node: node.meta.get("val") for node in graph.graph.nodes}
    try:
        graph.propagate()
    except Exception as error:
        fail(f"its shapes cannot be computed: {error}")
    for node, old in before.items():
        new = node.meta.get("val")
        if not (isinstance(old, torch.Tensor) and isinstance(new, torch.Tensor)):
            continue
        # Passes may change sizes, which depend on the step's rows and width, but neither dtype nor number of
        # dimensions.
        if (old.ndim, old.dtype) != (new.ndim, new.dtype):
            fail(f"node {node.name!r} was {old.dtype}{list(old.shape)}, now {new.dtype}{list(new.shape)}")

"""The step graph: a flat torch.fx graph in which every tensor is the value of a named port."""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import torch
from torch import fx

from speccompile.errors import PassError, UnknownValue
from speccompile.graph.body import Body
from speccompile.graph.fakes import fake
from speccompile.graph.port import Port
from speccompile.graph.propagation import is_current, mark_current, propagate
from speccompile.graph.state import Layout
from speccompile.graph.tracing import Tracer
from speccompile.utils.torch_private import pytree

# The Python operators that a graph may call in addition to torch ops: arithmetic on sizes, and getitem, which selects
# one of several results.
SIZE_OPERATORS = frozenset(
    {operator.add, operator.sub, operator.mul, operator.floordiv, operator.mod, operator.getitem}
    | {torch.sym_max, torch.sym_min}
)

Route = Literal["attention", "eager"]


class Values(dict[str, fx.Node]):
    """Nodes by the names that passes gave them.

    Raises:
        UnknownValue: ``values[name]`` was read, and no pass has named such a node so far.
    """

    def __missing__(self, name: str) -> fx.Node:
        raise UnknownValue(name=name, available=", ".join(sorted(self)) or "none")


class TracedProcessor(Protocol):
    """A user's logits processor as a traced function. :class:`speccompile.sampling.user.UserProcessor` implements
    it."""

    @property
    def name(self) -> str:
        """The name of the processor's class, or of the function."""

    @property
    def function(self) -> Callable[..., torch.Tensor]:
        """``(input_ids [R, P], scores [R, V], *held) -> scores [R, V]``."""

    @property
    def held(self) -> tuple[torch.Tensor, ...]:
        """The tensors that the processor holds. They become constants of the graph."""


@dataclass
class Anchors:
    """Nodes of the captured graph that passes refer to, found by module path. ``layers[i]`` is the one output of
    decoder layer i."""

    tokens: fx.Node
    positions: fx.Node
    start: fx.Node
    layers: list[fx.Node]
    final_norm: fx.Node
    lm_head: fx.Node

    def mapped(self, translate: Callable[[fx.Node], fx.Node]) -> Anchors:
        """The anchors with each node replaced by ``translate(node)``."""
        return Anchors(
            translate(self.tokens),
            translate(self.positions),
            translate(self.start),
            [translate(layer) for layer in self.layers],
            translate(self.final_norm),
            translate(self.lm_head),
        )


@dataclass
class StepGraph:
    """A step as data: the flat graph, its ports, anchors, named values, outlined bodies and facts.

    Passes edit it through the methods below. Only the verifier also changes ``graph``: it recomputes
    ``node.meta["val"]`` after every pass.

    Attributes:
        tracer: the tracer of :meth:`insert`, shared by all steps of a wrap.
        route: the way in which attention was captured (see :mod:`speccompile.graph_capture.attention`).
        logits_processors: the user's own processors, for the pass that processes logits.
        drafter: a mode's network, outlined, for the pass that copies it. Its bodies are among ``bodies``.
    """

    graph: fx.Graph
    ports: dict[str, Port]
    anchors: Anchors
    layout: Layout
    device: torch.device
    sizes: Mapping[str, int]
    facts: set[str] = field(default_factory=set)
    values: Values = field(default_factory=Values)
    bodies: dict[str, Body] = field(default_factory=dict)
    tracer: Tracer = field(default_factory=Tracer, repr=False)
    route: Route = "attention"
    logits_processors: tuple[TracedProcessor, ...] = ()
    drafter: StepGraph | None = field(default=None, repr=False)

    def copy(self) -> StepGraph:
        """A separate graph that shares ports, bodies and weights with this one."""
        graph = fx.Graph()
        node_map: dict[fx.Node, fx.Node] = {}
        result = graph.graph_copy(self.graph, node_map)
        graph.output(result)
        for old, new in node_map.items():
            new.meta = copy.copy(old.meta)
            if is_current(old):
                mark_current(new)
        return StepGraph(
            graph=graph,
            ports=dict(self.ports),
            anchors=self.anchors.mapped(node_map.__getitem__),
            layout=self.layout,
            device=self.device,
            sizes=dict(self.sizes),
            route=self.route,
            facts=set(self.facts),
            values=Values((name, node_map[node]) for name, node in self.values.items()),
            bodies=dict(self.bodies),
            tracer=self.tracer,
            logits_processors=self.logits_processors,
            drafter=self.drafter,
        )

    # --- reading ---------------------------------------------------------------------------------

    @property
    def placeholders(self) -> list[fx.Node]:
        """The nodes of the ports, in the order in which ``step`` receives them."""
        return list(self.graph.find_nodes(op="placeholder"))

    @property
    def weights(self) -> dict[str, torch.Tensor]:
        """The model's own tensors that the graph reads, by path."""
        ports = self.ports.values()
        return {port.path: port.value for port in ports if port.path and not port.own and port.value is not None}

    @property
    def constants(self) -> list[torch.Tensor]:
        """The tensors that the graph reads, other than state, inputs, and parameters and buffers of the model."""
        ports = [port for port in self.ports.values() if port.role == "weight" and not (port.path or port.parts)]
        return [port.value for port in ports if port.value is not None]

    @property
    def output(self) -> fx.Node:
        """The node that returns the outputs."""
        return self.graph.output_node()

    def op_counts(self) -> dict[str, int]:
        """The number of calls of each op or body, most frequent first."""
        counts: dict[str, int] = {}
        for node in self.graph.nodes:
            if node.op in ("call_function", "call_module"):
                name = node.target if isinstance(node.target, str) else str(node.target)
                counts[name] = counts.get(name, 0) + 1
        return dict(sorted(counts.items(), key=lambda item: (-item[1], item[0])))

    # --- editing ---------------------------------------------------------------------------------

    def state(self, name: str) -> fx.Node:
        """The placeholder of state tensor ``name``. It is added if the graph does not have it yet.

        Raises:
            PassError: the layout has no such tensor.
        """
        if name not in self.layout.tensors:
            raise PassError(f"there is no state tensor {name!r}; declare it in the state_specs() of the pass")
        return self._placeholder(Port.of_state(self.layout.tensors[name], self.device))

    def constant(self, name: str, value: torch.Tensor) -> fx.Node:
        """The placeholder of a tensor that is neither weight nor state. It is added if the graph does not have it
        yet."""
        return self._placeholder(Port.of_constant(name, value))

    def weight(self, port: Port) -> fx.Node:
        """The placeholder of a weight in another form than the model's. It is added if the graph does not have it
        yet."""
        return self._placeholder(port)

    def input(self, port: Port) -> fx.Node:
        """The placeholder of an input. It is added if the graph does not have it yet."""
        return self._placeholder(port)

    def resize_state(self, node: fx.Node) -> None:
        """Give the placeholder of a state tensor the sizes that it has in the layout now. All nodes that read it must
        be changed."""
        port = self.ports[node.name] = Port.of_state(self.layout.tensors[node.name], self.device)
        node.meta["val"] = fake(port.shape, port.dtype, self.device)

    def drop_placeholder(self, node: fx.Node) -> None:
        """Remove a placeholder that no node reads."""
        del self.ports[node.name]
        self.graph.erase_node(node)

    def _placeholder(self, port: Port) -> fx.Node:
        for node in self.placeholders:
            if node.name == port.name:
                if self.ports[node.name].role != port.role:
                    raise PassError(f"the {port.role} {port.name!r} has the name of a {self.ports[node.name].role}")
                return node
        if port.name in self.bodies:
            raise PassError(f"the {port.role} {port.name!r} has the name of an outlined body")
        with self.graph.inserting_after(self.placeholders[-1]):
            node = self.graph.placeholder(port.name)
        # fx converts names to lower case, and a weight must keep the name of its module.
        node._rename(port.name)
        if node.name != port.name:
            raise PassError(f"the {port.role} {port.name!r} has the name of a node of the graph")
        self.ports[port.name] = port
        node.meta["val"] = fake(port.shape, port.dtype, self.device)
        return node

    def insert(
        self, function: Callable[..., Any], *nodes: fx.Node, before: fx.Node | None = None, **constants: Any
    ) -> Any:
        """Trace ``function(*tensors, **constants)`` on the fakes of ``nodes``, and insert its ops into the graph.

        The function consists of PyTorch ops and may write state in place. Calls with equal fakes and equal constants
        share one trace.

        Args:
            before: the node before which the ops are inserted; None is the end of the graph.

        Returns:
            The function's result, with a node for each tensor.
        """
        traced = self.tracer.trace(function, nodes, constants)
        node_map = dict(zip(traced.graph.find_nodes(op="placeholder"), nodes, strict=True))
        with self.graph.inserting_before(before or self.output):
            for node in traced.graph.nodes:
                if node.op == "call_function":
                    new = self.graph.node_copy(node, node_map.__getitem__)
                    # The trace has computed it for this target and these arguments.
                    new.meta = {"val": node.meta.get("val")}
                    mark_current(new)
                    node_map[node] = new
        outputs: Any = traced.graph.output_node().args[0]
        return pytree.tree_unflatten([None if out is None else node_map[out] for out in outputs], traced.structure)

    def splice(self, output: fx.Node, replace: Mapping[fx.Node, fx.Node], before: fx.Node) -> fx.Node:
        """Copy the part of the graph that computes ``output``, with other inputs.

        Placeholders are shared: the copy reads the same weights and writes the same KV.

        Args:
            replace: nodes by nodes. The copy reads the values instead of the keys.
            before: the node before which the copy is inserted. The copied nodes must come earlier.

        Returns:
            The copy of ``output``.
        """
        needed: set[fx.Node] = set()
        stack = [output]
        while stack:
            node = stack.pop()
            if node not in needed and node not in replace and node.op != "placeholder":
                needed.add(node)
                stack.extend(node.all_input_nodes)
        node_map = dict(replace)
        for node in self.placeholders:
            node_map.setdefault(node, node)
        with self.graph.inserting_before(before):
            for node in [node for node in self.graph.nodes if node in needed]:
                new = self.graph.node_copy(node, node_map.__getitem__)
                new.meta = {}
                node_map[node] = new
        self.propagate()
        return node_map[output]

    def bind_input(self, name: str, node: fx.Node) -> None:
        """Replace the input ``name`` by ``node`` in all nodes that read it, and remove the input."""
        self.replace(next(item for item in self.placeholders if item.name == name), node)
        del self.ports[name]

    def replace(self, old: fx.Node, new: fx.Node) -> None:
        """Replace ``old`` by ``new`` in all nodes, anchors and named values, and remove ``old``."""
        old.replace_all_uses_with(new)
        self.anchors = self.anchors.mapped(lambda item: new if item is old else item)
        self.graph.erase_node(old)
        for name, node in list(self.values.items()):
            if node is old:
                self.name_value(name, new)

    def name_value(self, name: str, node: fx.Node) -> None:
        """Name a node. Later passes find it in :attr:`values`, and the printed step shows the name."""
        self.values[name] = node
        node._rename(name)

    def set_outputs(self, *nodes: fx.Node) -> None:
        """Set ``nodes`` as the graph's only outputs."""
        self.output.args = (tuple(nodes),)

    def remove_dead_code(self, keep: Collection[fx.Node] = ()) -> None:
        """Remove nodes without effect, their named values, and ports that no node reads. The nodes ``keep`` and their
        inputs stay."""
        nodes = list(self.graph.nodes)
        from_start = nodes[nodes.index(self.anchors.start) :]
        self.graph.eliminate_dead_code(lambda node: node in keep or self._has_effect(node))
        for node in reversed(self.placeholders):
            if not node.users:
                self.graph.erase_node(node)
                del self.ports[node.name]
        live = set(self.graph.nodes)
        self.anchors.start = next(node for node in from_start if node in live)
        self.values = Values((name, node) for name, node in self.values.items() if node in live)

    def _has_effect(self, node: fx.Node) -> bool:
        """Whether ``node`` writes state. Bodies of layers write KV; the bodies before and after the layers only return
        results."""
        return self.bodies[str(node.target)].part == "layers" if node.op == "call_module" else node.is_impure()

    # --- shapes ----------------------------------------------------------------------------------

    def propagate(self) -> None:
        """Recompute ``meta["val"]`` of new and changed nodes, and of the nodes that depend on them."""
        propagate(self.graph, self.ports, self.bodies, self.device)

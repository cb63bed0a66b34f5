"""Outlining: equal decoder layers become calls of one body, so that one compiled artifact serves them all."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any, ClassVar, cast

import torch
from torch import fx

from speccompile.errors import AnchorError
from speccompile.graph_capture.graph import Body, StepGraph
from speccompile.passes.base import Changes, Facts, Pass, facts
from speccompile.passes.verify import written

aten = torch.ops.aten

_KV = ("k_", "v_")


@dataclass(frozen=True)
class OutlineLayers(Pass):
    """Groups decoder layers by structure and constants and replaces each by a call of its group's body.

    Layers that differ in a constant (a window, a scale) get bodies of their own. A body takes the hidden state
    first and keeps rows and width symbolic; sizes that the layer read from elsewhere are read from the hidden
    state instead, so that no size crosses the boundary.
    """

    name: ClassVar[str] = "outline"
    looks_for: ClassVar[str] = "decoder layers"
    requires: ClassVar[Facts] = facts("captured", "attention_chosen", "linears_chosen")
    provides: ClassVar[Facts] = facts("outlined")

    def run(self, graph: StepGraph) -> Changes:
        groups: dict[str, list[tuple[int, _Region]]] = {}
        for index, live_out in enumerate(graph.anchors.layers):
            region = _Region.of(graph, index, live_out)
            groups.setdefault(region.key(), []).append((index, region))
        owner: dict[int, tuple[str, _Region]] = {}
        for number, (key, members) in enumerate(groups.items()):
            name = "decoder_layer" if number == 0 else f"decoder_layer_{number}"
            body = members[0][1].body(graph, name, tuple(index for index, _ in members), key)
            graph.bodies[name] = body
            owner |= {index: (name, region) for index, region in members}
        calls: dict[fx.Node, fx.Node] = {}
        for index in sorted(owner):
            name, region = owner[index]
            calls[region.live_out] = region.replace_by_call(graph, name, index, calls)
            graph.anchors.layers[index] = calls[region.live_out]
        graph.remove_dead_code()
        layers = sum(len(members) for members in groups.values())
        return Changes(layers, f"{layers} decoder layers call {len(groups)} {'body' if len(groups) == 1 else 'bodies'}")


@dataclass
class _Region:
    """The nodes of one decoder layer, its inputs in first-use order, and its one live-out."""

    nodes: list[fx.Node]
    inputs: list[fx.Node]
    sizes: dict[fx.Node, int]
    live_out: fx.Node

    @staticmethod
    def of(graph: StepGraph, index: int, live_out: fx.Node) -> _Region:
        nodes = [node for node in graph.graph.nodes if node.meta.get("layer") == index]
        inside = set(nodes)
        outside: list[fx.Node] = []
        for node in nodes:
            outside.extend(x for x in node.all_input_nodes if x not in inside and x not in outside)
        hidden = next((node for node in outside if _is_hidden_state(node, graph)), None)
        if hidden is None:
            raise AnchorError(anchor=f"the input of decoder layer {index}", reason="it reads no hidden state")
        inputs = [hidden] + [x for x in outside if x is not hidden and isinstance(x.meta["val"], torch.Tensor)]
        sizes = {}
        for node in outside:
            size = node.meta["val"]
            if not isinstance(size, torch.Tensor):
                if size not in hidden.meta["val"].shape:
                    raise AnchorError(
                        anchor=f"the input of decoder layer {index}",
                        reason=f"the size {node.name!r} ({size}) is none of its hidden state's",
                    )
                sizes[node] = list(hidden.meta["val"].shape).index(size)
        return _Region(nodes, inputs, sizes, live_out)

    def key(self) -> str:
        """Equal for layers that compute the same function of their inputs."""
        number = {node: f"in{i}" for i, node in enumerate(self.inputs)}
        number |= {node: f"size{dim}" for node, dim in self.sizes.items()}
        number |= {node: f"n{i}" for i, node in enumerate(self.nodes)}

        def canonical(value: Any) -> str:
            # A Ref stands for a node only while it is printed, so it need not be what fx takes for an argument.
            return repr(fx.map_arg(value, lambda node: cast(Any, _Ref(number[node]))))

        lines = [f"{x.meta['val'].dtype}{list(x.meta['val'].shape)}" for x in self.inputs]
        for node in self.nodes:
            lines.append(f"{node.target}{canonical(node.args)}{canonical(node.kwargs)}")
        lines.append(number[self.live_out])
        return hashlib.sha256("\n".join(lines).encode()).hexdigest()

    def body(self, graph: StepGraph, name: str, layers: tuple[int, ...], key: str) -> Body:
        inner = fx.Graph()
        node_map: dict[fx.Node, fx.Node] = {}
        prefix = _layer_prefix(self.inputs)
        for node in self.inputs:
            node_map[node] = inner.placeholder(_input_name(node, node is self.inputs[0], prefix))
            node_map[node].meta = {"val": node.meta["val"]}
        hidden = node_map[self.inputs[0]]
        for node, dim in self.sizes.items():
            node_map[node] = inner.call_function(aten.sym_size.int, (hidden, dim))
        for node in self.nodes:
            node_map[node] = inner.node_copy(node, node_map.__getitem__)
            node_map[node].meta = {}
        inner.output(node_map[self.live_out])
        dims = tuple(_dims(node, graph) for node in self.inputs)
        return Body(
            name=name,
            module=fx.GraphModule(torch.nn.Module(), inner, class_name=name),
            dims=dims,
            dtypes=tuple(node.meta["val"].dtype for node in self.inputs),
            mutates=frozenset(self._mutated(graph)),
            layers=layers,
            key=key,
        )

    def _mutated(self, graph: StepGraph) -> set[int]:
        return {
            self.inputs.index(target) for node in self.nodes for target in written(graph, node) if target in self.inputs
        }

    def replace_by_call(self, graph: StepGraph, name: str, index: int, calls: dict[fx.Node, fx.Node]) -> fx.Node:
        """Put a call where the layer was; ``calls`` stand for the live-outs of layers already replaced."""
        inputs = tuple(calls.get(node, node) for node in self.inputs)
        with graph.graph.inserting_before(self.nodes[0]):
            call = graph.graph.create_node("call_module", name, inputs, name=f"layer_{index}")
        call.meta = {"pass": "outline", "layer": index, "val": self.live_out.meta["val"]}
        self.live_out.replace_all_uses_with(call, delete_user_cb=lambda user: user not in set(self.nodes))
        for node in reversed(self.nodes):
            graph.graph.erase_node(node)
        return call


@dataclass(frozen=True)
class _Ref:
    text: str

    def __repr__(self) -> str:
        return self.text


def _is_hidden_state(node: fx.Node, graph: StepGraph) -> bool:
    value = node.meta["val"]
    return (
        node.op != "placeholder"
        and isinstance(value, torch.Tensor)
        and value.is_floating_point()
        and list(value.shape[:2]) == [graph.sizes["B"], graph.sizes["T"]]
    )


def _dims(node: fx.Node, graph: StepGraph) -> tuple[int | str, ...]:
    """The sizes of a body's input, with names for those that differ between steps (B, T) and wraps (N, S)."""
    shape = tuple(node.meta["val"].shape)
    if node.name.startswith(_KV):
        return ("N", "S", *shape[2:])
    varying = {size: dim for dim, size in graph.sizes.items()}
    return tuple(varying.get(size, size) for size in shape)


def _layer_prefix(inputs: list[fx.Node]) -> str:
    """What the names of all weights of the layer start with, such as ``model_layers_0_``."""
    names = [node.name for node in inputs if node.name.endswith(("_weight", "_bias"))]
    if not names:
        return ""
    first, last = min(names), max(names)
    common = next((i for i, (a, b) in enumerate(zip(first, last, strict=False)) if a != b), 0)
    return first[: first.rfind("_", 0, common) + 1]


def _input_name(node: fx.Node, is_hidden: bool, prefix: str) -> str:
    if is_hidden:
        return "hidden"
    if node.name.startswith(_KV):
        return f"{node.name[0]}_cache"
    return node.name.removeprefix(prefix)

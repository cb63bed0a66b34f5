"""Outlining: equal decoder layers become calls of one body, which one compiled artifact serves."""

from __future__ import annotations

import functools
import hashlib
import operator
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, cast

import torch
from torch import fx

from speccompile.errors import AnchorError
from speccompile.graph.body import Body, BodyResult
from speccompile.graph.paging import PAGES
from speccompile.graph.splicing import PREFIX
from speccompile.graph.step_graph import StepGraph, Values
from speccompile.graph.verify import written
from speccompile.ops.cpu.forms import FORMS
from speccompile.passes.base import Changes, Facts, Pass, PassRegion, facts
from speccompile.passes.target.local_sizes import factors, keep_sizes_local

#: Mark of the nodes of a layer that compute the norm which the next layer begins with, and what its result is called.
AHEAD, NORMED = "ahead", "normed"


@dataclass(frozen=True)
class OutlineLayers(Pass):
    """Groups decoder layers by structure and constants and replaces each by a call of its group's body.

    Layers that differ in a constant (a window, a scale) get separate bodies. The hidden state is a body's first input,
    and rows and width stay symbolic. A body reads sizes from its own inputs: no size crosses the boundary.
    """

    name: ClassVar[str] = "outline"
    looks_for: ClassVar[str] = "decoder layers"
    region: ClassVar[PassRegion] = "model"
    requires: ClassVar[Facts] = facts("captured", "attention_chosen", "linears_chosen")
    provides: ClassVar[Facts] = facts("outlined")

    def run(self, graph: StepGraph) -> Changes:
        keep_sizes_local(graph)
        groups: dict[str, list[tuple[int, _Region]]] = {}
        for index, live_out in enumerate(graph.anchors.layers):
            if index > 0 and live_out is graph.anchors.layers[index - 1]:
                continue
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
            calls |= region.replace_by_call(graph, name, index, calls)
        graph.anchors = graph.anchors.mapped(lambda node: calls.get(node, node))
        graph.values = Values((name, calls.get(node, node)) for name, node in graph.values.items())
        graph.remove_dead_code()
        layers = sum(len(members) for members in groups.values())
        return Changes(layers, f"{layers} decoder layers call {len(groups)} {'body' if len(groups) == 1 else 'bodies'}")


@dataclass
class _Region:
    """The nodes of one decoder layer, its inputs in first-use order, and its live-outs: the hidden state that it
    leaves, and what else is read outside of it."""

    nodes: list[fx.Node]
    inputs: list[fx.Node]
    live_outs: list[fx.Node]

    @staticmethod
    def of(graph: StepGraph, index: int, live_out: fx.Node) -> _Region:
        nodes, outside = _region(graph, index)
        hidden, inside = _hidden_state(outside, graph, index), set(nodes)
        others = [node for node in nodes if node.meta.get(AHEAD) and not inside.issuperset(node.users)]
        return _Region(nodes, [hidden, *(x for x in outside if x is not hidden)], [live_out, *others])

    def key(self) -> str:
        """Equal for layers that compute the same function of their inputs."""
        return key_of(self.nodes, self.inputs, self.live_outs)

    def body(self, graph: StepGraph, name: str, layers: tuple[int, ...], key: str) -> Body:
        inner = fx.Graph()
        node_map: dict[fx.Node, fx.Node] = {}
        ahead = self._ahead()
        prefix, taken = _layer_prefix([node for node in self.inputs if node not in ahead]), Counter[str]()
        # The same with the number of any layer.
        prefixes = re.compile(re.sub(r"\d+", r"\\d+", prefix))
        for node in self.inputs:
            own = "hidden" if node is self.inputs[0] else input_name(node, graph, prefix)
            if node in ahead:
                own = f"next_{prefixes.sub('', node.name, count=1)}"
            elif node.name.startswith(f"{NORMED}_"):
                own = NORMED
            taken[own] += 1
            # A layer with two attentions has two caches.
            node_map[node] = inner.placeholder(own if taken[own] == 1 else f"{own}_{taken[own]}")
            node_map[node].meta = {"val": node.meta["val"]}
        for node in self.nodes:
            args = cast(Any, fx.map_arg(node.args, node_map.__getitem__))
            kwargs = cast(Any, fx.map_arg(node.kwargs, node_map.__getitem__))
            # Counted anew: names in the bodies of equal layers must not depend on the layer's index.
            base = re.sub(r"_\d+$", "", node.name)
            node_map[node] = inner.create_node(node.op, node.target, args, kwargs, base)
        returned = tuple(node_map[node] for node in self.live_outs)
        inner.output(returned[0] if len(returned) == 1 else returned)
        return Body(
            name=name,
            module=fx.GraphModule(torch.nn.Module(), inner, class_name=name),
            dims=dims_of(self.inputs, graph),
            dtypes=tuple(node.meta["val"].dtype for node in self.inputs),
            results=tuple(result_of(node, graph) for node in self.live_outs),
            captured=dict(graph.sizes),
            mutates=frozenset(self._mutated(graph)),
            layers=layers,
            key=key,
        )

    def _ahead(self) -> set[fx.Node]:
        """Weights of the layer after this one."""
        inside = set(self.nodes)
        found = (node for node in self.inputs if node.op == "placeholder")
        return {node for node in found if all(user.meta.get(AHEAD) for user in node.users if user in inside)}

    def _mutated(self, graph: StepGraph) -> set[int]:
        return {
            self.inputs.index(target) for node in self.nodes for target in written(graph, node) if target in self.inputs
        }

    def replace_by_call(
        self, graph: StepGraph, name: str, index: int, calls: dict[fx.Node, fx.Node]
    ) -> dict[fx.Node, fx.Node]:
        """Put a call where the layer was; ``calls`` stand for the live-outs of layers already replaced. Returns what
        stands for those of this one."""
        meta, inside = {"pass": "outline", "layer": index}, set(self.nodes)
        with graph.graph.inserting_before(self.nodes[0]):
            inputs = tuple(_contiguous(graph, calls.get(node, node)) for node in self.inputs)
            several = len(self.live_outs) > 1
            own = f"layer_{index}" + "_results" * several
            call = graph.graph.create_node("call_module", name, inputs, name=own)
            call.meta, results = dict(meta), [call]
            if several:
                names = [f"layer_{index}", *(f"layer_{index}_{NORMED}" for _ in self.live_outs[1:])]
                getitem = functools.partial(graph.graph.create_node, "call_function", operator.getitem)
                results = [getitem((call, place), name=own) for place, own in enumerate(names)]
        for node, result in zip(self.live_outs, results, strict=True):
            result.meta = meta | {"val": node.meta["val"]}
            node.replace_all_uses_with(result, delete_user_cb=lambda user: user not in inside)
        for node in reversed(self.nodes):
            graph.graph.erase_node(node)
        return dict(zip(self.live_outs, results, strict=True))


def _contiguous(graph: StepGraph, node: fx.Node) -> fx.Node:
    """A body is compiled for inputs that lie in memory in the order of their dimensions; slices, such as a layer's part
    of Gemma 3n's per-layer embeddings, do not.
    """
    value = node.meta["val"]
    if value.is_contiguous():
        return node
    copy = graph.graph.call_function(torch.ops.aten.contiguous.default, (node,))
    copy.meta = {"pass": "outline", "val": value.contiguous()}
    return copy


@dataclass(frozen=True)
class _Ref:
    text: str

    def __repr__(self) -> str:
        return self.text


def layer_input(graph: StepGraph, index: int) -> fx.Node:
    """The hidden state that decoder layer ``index`` reads, ``[B, T, M]``, of a captured or outlined model.

    Raises:
        AnchorError: the layer reads none.
    """
    call = call_of(graph.anchors.layers[index])
    if call.op == "call_module":
        return call.all_input_nodes[0]
    return _hidden_state(_region(graph, index)[1], graph, index)


def call_of(layer: fx.Node) -> fx.Node:
    """The call of the body that computes ``layer``, an anchor of an outlined graph; it may be one result of several."""
    if layer.target is operator.getitem:
        call = layer.args[0]
        assert isinstance(call, fx.Node)
        return call
    return layer


def _region(graph: StepGraph, index: int) -> tuple[list[fx.Node], list[fx.Node]]:
    """The nodes of a decoder layer, and what they read from elsewhere, in the order of its first use."""
    nodes = [node for node in graph.graph.nodes if node.meta.get("layer") == index]
    inside = set(nodes)
    return nodes, list(dict.fromkeys(x for node in nodes for x in node.all_input_nodes if x not in inside))


def _hidden_state(outside: list[fx.Node], graph: StepGraph, index: int) -> fx.Node:
    """The previous layer's output, or for the first layer the first floating ``[B, T, ...]`` that is read."""
    if index > 0 and graph.anchors.layers[index - 1] in outside:
        return graph.anchors.layers[index - 1]
    normed = next((node for node in outside if node.name.startswith(f"{NORMED}_")), None)
    for node in outside:
        value = node.meta["val"]
        if node.op == "placeholder" or not isinstance(value, torch.Tensor) or not value.is_floating_point():
            continue
        # Beside its norm it is not what is read first.
        differs = normed is not None and (node is normed or value.shape != normed.meta["val"].shape)
        if list(value.shape[:2]) == [graph.sizes["B"], graph.sizes["T"]] and not differs:
            return node
    raise AnchorError(anchor=f"the input of decoder layer {index}", reason="it reads no hidden state")


def _is_state(node: fx.Node, graph: StepGraph) -> bool:
    return node.op == "placeholder" and graph.ports[node.name].role == "state"


def key_of(nodes: list[fx.Node], inputs: list[fx.Node], live_outs: list[fx.Node]) -> str:
    """A digest, equal for parts that compute the same ``live_outs`` of their inputs."""
    number = {node: f"in{i}" for i, node in enumerate(inputs)}
    number |= {node: f"n{i}" for i, node in enumerate(nodes)}

    def canonical(value: Any) -> str:
        # A Ref stands for a node only while it is printed, so it need not be a type that fx accepts as an argument.
        return repr(fx.map_arg(value, lambda node: cast(Any, _Ref(number[node]))))

    lines = [f"{x.meta['val'].dtype}{list(x.meta['val'].shape)}" for x in inputs]
    for node in nodes:
        lines.append(f"{node.target}{canonical(node.args)}{canonical(node.kwargs)}")
    lines.extend(number[node] for node in live_outs)
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def result_of(live_out: fx.Node, graph: StepGraph) -> BodyResult:
    """The sizes of a body's result, with names for those that differ between steps."""
    value = live_out.meta["val"]
    dims = tuple(_product(size, graph.sizes) for size in value.shape) if value.is_contiguous() else None
    return BodyResult(dims, value.dtype)


def dims_of(inputs: list[fx.Node], graph: StepGraph) -> tuple[tuple[int | str, ...], ...]:
    """The sizes of a body's inputs, with names for those that differ between steps (B, T) and wraps (N, S)."""
    weights = {node for node in inputs if node.op == "placeholder" and graph.ports[node.name].role == "weight"}
    fixed = {size for node in weights for size in node.meta["val"].shape}
    places = graph.layout.cache_len
    # S is distinguished from other sizes by its value, so where a weight has that size as well it stays a number.
    own: int | str = places if places in fixed and graph.route == "eager" else "S"

    def name(size: int) -> int | str:
        if graph.route == "eager" and size == places:
            return own
        return _product(size, graph.sizes)

    dims: list[tuple[int | str, ...]] = []
    for node in inputs:
        shape = tuple(node.meta["val"].shape)
        if node in weights:
            dims.append(shape)
        elif _is_state(node, graph):
            tensor = graph.layout.tensors[node.name]
            of_slot = ("N", own, *shape[2:]) if tensor.follows_text else ("N", *shape[1:])
            if graph.layout.paging is not None and tensor.in_pages:
                of_slot = ("P", *shape[1:])
            dims.append(("N", "M") if node.name == PAGES else of_slot if tensor.per_slot else shape)
        else:
            dims.append(tuple(name(size) for size in shape))
    return tuple(dims)


def _product(size: int, sizes: Mapping[str, int]) -> int | str:
    names, rest = factors(size, sizes)
    return "*".join(names if rest == 1 else [str(rest), *names]) if names else size


#: Endings of the names of weights, packed ones among them.
_OF_WEIGHTS = ("_weight", "_bias", *(f"_{form.tensors[0]}" for form in FORMS.values()))


def _layer_prefix(inputs: list[fx.Node]) -> str:
    """The common start of the names of all weights of the layer, such as ``model_layers_0_``."""
    names = [node.name for node in inputs if node.name.endswith(_OF_WEIGHTS)]
    if not names:
        return ""
    first, last = min(names), max(names)
    common = next((i for i, (a, b) in enumerate(zip(first, last, strict=False)) if a != b), 0)
    prefix = first[: first.rfind("_", 0, common) + 1]
    while prefix and first[len(prefix)].isdigit():
        # The rest is a name of Python's.
        prefix = prefix[: prefix.rfind("_", 0, len(prefix) - 1) + 1]
    return prefix


def input_name(node: fx.Node, graph: StepGraph, prefix: str = "") -> str:
    """The name of a body's input that stands for ``node``: less the layer's number, or the ``prefix`` that names it."""
    if _is_state(node, graph):
        # A drafter's have a prefix, and may share a body with the target's.
        name = re.sub(r"_\d+", "", node.name.removeprefix(PREFIX), count=1)
        return f"{name}_cache" if graph.layout.tensors[node.name].follows_text else name
    return node.name.removeprefix(prefix)

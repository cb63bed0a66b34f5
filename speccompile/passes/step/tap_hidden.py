"""Hidden states of chosen decoder layers: marked where they are, then lowered to one tensor.

A mark is a name in ``StepGraph.values``: it costs nothing, follows its node through other passes, and adds no reader.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from torch import fx

from speccompile.errors import AnchorError, InvalidHead
from speccompile.graph.step_graph import StepGraph
from speccompile.ops.draft_rows import form_of, side_by_side
from speccompile.passes.base import Changes, Facts, Pass, PassRegion, facts
from speccompile.passes.target.outline import layer_input

#: The beginning of the names of marks.
MARK = "mark_"


@dataclass(frozen=True)
class Tap:
    """A place in the target.

    Args:
        at: a decoder layer, by index (negative ones count from the end) or module path (``"model.layers.3"``), whose
            output is meant; or the module path of the final norm.
        post_norm: after the model's final norm, at any layer.
        before: what the layer reads, not its output: of layer 0 the embedding, as the model scales it.
    """

    at: int | str
    post_norm: bool = False
    before: bool = False


@dataclass(frozen=True)
class MarkTaps(Pass):
    """Names the hidden state of each tap ``mark_tap_0``, ``mark_tap_1``, ..., ``[B, T, M]``; of a captured or outlined
    model. Runs before the passes that leave the final norm fewer positions, or remove it: a tap has all positions that
    the target reads, in every step and in every chunk of a prompt.

    Raises:
        AnchorError: the model has no such place.
    """

    taps: tuple[Tap, ...]

    name: ClassVar[str] = "mark_taps"
    prefix: ClassVar[str] = "tap"
    looks_for: ClassVar[str] = "decoder layers to tap"
    region: ClassVar[PassRegion] = "other"
    requires: ClassVar[Facts] = facts("captured", "logits")
    provides: ClassVar[Facts] = facts("taps_marked")

    def run(self, graph: StepGraph) -> Changes:
        for index, tap in enumerate(self.taps):
            graph.values[mark(index, self.prefix)] = _place(graph, tap)
        labels = (f"{'before ' * tap.before}{tap.at}{', normed' * tap.post_norm}" for tap in self.taps)
        return Changes(len(self.taps), ", ".join(labels))


@dataclass(frozen=True)
class LowerTaps(Pass):
    """Joins the marked hidden states to one tensor, ``tapped`` ``[B, T, taps * M]``, in the order of the marks.

    It runs after the commit, when no pass removes nodes without readers any more.
    """

    name: ClassVar[str] = "lower_taps"
    named_values: ClassVar[tuple[str, ...]] = ("tapped",)
    looks_for: ClassVar[str] = "marked hidden states"
    region: ClassVar[PassRegion] = "other"
    requires: ClassVar[Facts] = facts("taps_marked", "committed")
    provides: ClassVar[Facts] = facts("tapped")
    invalidates: ClassVar[Facts] = facts("taps_marked")

    def run(self, graph: StepGraph) -> Changes:
        taken = take_marks(graph)
        if taken:
            graph.name_value("tapped", graph.insert(form_of(side_by_side, graph.facts), *taken))
        return Changes(len(taken), f"{len(taken)} hidden states side by side")


def mark(index: int, prefix: str = MarkTaps.prefix) -> str:
    return f"{MARK}{prefix}_{index}"


def marked(graph: StepGraph) -> list[fx.Node]:
    """Marked nodes that no pass has used yet: a pass that removes dead code keeps them."""
    return [node for name, node in graph.values.items() if name.startswith(MARK)]


def take_marks(graph: StepGraph, prefix: str = MarkTaps.prefix) -> list[fx.Node]:
    """Remove the marks and return the marked nodes, in order."""
    taken: list[fx.Node] = []
    while mark(len(taken), prefix) in graph.values:
        taken.append(graph.values.pop(mark(len(taken), prefix)))
    return taken


def _place(graph: StepGraph, tap: Tap) -> fx.Node:
    layers, normed = graph.anchors.layers, graph.anchors.final_norm
    index = tap.at if isinstance(tap.at, int) else _layer_at(graph, tap.at)
    if index is None and not tap.before:
        return normed
    if index is None or (tap.before and tap.post_norm):
        raise AnchorError(anchor=f"{tap}", reason="before= needs at= of a decoder layer, and no post_norm=")
    if not -len(layers) <= index < len(layers):
        raise AnchorError(anchor=f"decoder layer {index}", reason=f"the model has {len(layers)}")
    if tap.before:
        return layer_input(graph, index % len(layers))
    layer = layers[index]
    if not tap.post_norm:
        return layer
    return normed if layer is layers[-1] else graph.splice(normed, {layers[-1]: layer}, before=graph.output)


def _layer_at(graph: StepGraph, path: str) -> int | None:
    """The layer whose module has that path; None is the final norm."""
    read: dict[int, set[str]] = {index: set() for index in range(len(graph.anchors.layers))}
    for node in graph.graph.nodes:
        if "layer" in node.meta:
            read[node.meta["layer"]] |= set(_weights_of(graph, node))
    for index, weights in read.items():
        # A layer may compute the norm that the next one begins with.
        if 2 * sum(weight.startswith(f"{path}.") for weight in weights) > len(weights):
            return index
    norm: set[str] = set()
    stack = [graph.anchors.final_norm]
    while stack:
        node = stack.pop()
        if node is not graph.anchors.layers[-1] and node.op != "placeholder":
            norm |= set(_weights_of(graph, node))
            stack.extend(node.all_input_nodes)
    if not (norm and all(weight.startswith(f"{path}.") for weight in norm)):
        reason = "no decoder layer's weights, nor the final norm's, are inside a module of that path"
        raise AnchorError(anchor=repr(path), reason=reason)
    return None


def _weights_of(graph: StepGraph, node: fx.Node) -> Iterator[str]:
    for argument in node.all_input_nodes:
        port = graph.ports.get(argument.name) if argument.op == "placeholder" else None
        if port is not None and port.role == "weight" and port.path:
            yield port.path


def default_taps(num_layers: int) -> tuple[int, ...]:
    """The layers that EAGLE-3 reads of a target of L layers: an early, a middle and a late one.

    Raises:
        InvalidHead: there are too few.
    """
    if num_layers <= 5:
        reason = f"the usual three layers exist in targets of more than 5, and this one has {num_layers}"
        raise InvalidHead(source="EAGLE-3", reason=f"{reason}; name them in eagle_aux_hidden_state_layer_ids")
    return (1, num_layers // 2 - 1, num_layers - 4)

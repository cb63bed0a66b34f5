"""Regions of the calls of a step, from the region of the pass that added a call, and from data flow in decoder layers.

Module names of the model are not used, so this holds for every family.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from torch import fx

from speccompile.graph.body import Body, Part
from speccompile.graph.stage import CAPTURE
from speccompile.graph.step_graph import StepGraph
from speccompile.graph.verify import written
from speccompile.lowering.pooled import PRODUCTS
from speccompile.passes.base import Pass
from speccompile.report.program_data import Region
from speccompile.utils.torch_private import OpOverload

#: Ops that adapters add to linears.
_ADAPTERS = frozenset({"lora", "native_lora"})
_ENDS: dict[Part, Region] = {"prologue": "embedding", "epilogue": "lm_head"}
#: Parts of the names of ops that mix the tokens of a sequence.
_MIXERS = ("attention", "causal_conv", "gated_delta_rule", "selective_scan")


def regions_of_passes(passes: Iterable[Pass]) -> dict[str, Region | None]:
    """Regions by name of the pass, with the capture. None is the model."""
    found: dict[str, Region | None] = {CAPTURE: None}
    for item in passes:
        if item.region != "model":
            found[item.name] = item.region
        else:
            found[item.name] = "other" if item.is_users else None
    return found


def regions_of_step(graph: StepGraph, of_passes: Mapping[str, Region | None]) -> dict[fx.Node, Region]:
    """Region of every call.

    Captured calls, and calls that passes over the model added, belong to the model: the embedding before the layers,
    the layers, and the lm_head after them. Calls of passes that are missing in ``of_passes`` are ``other``.
    """
    calls = [node for node in graph.graph.nodes if node.op in ("call_function", "call_module")]
    layers = set(graph.anchors.layers)
    added = {node: of_passes.get(node.meta["pass"], "other") for node in calls}
    own = [node for node in calls if added.get(node) is None]
    ends = [place for place, node in enumerate(own) if node in layers]
    # In the captured model a layer consists of many calls, and its anchor is the last of them.
    starts = [place for place, node in enumerate(own) if "layer" in node.meta or node in layers]
    first, last = (min(starts, default=len(own)), max(ends, default=-1))
    found: dict[fx.Node, Region] = {}
    for place, node in enumerate(own):
        found[node] = "embedding" if place < first else "layers" if place <= last else "lm_head"
    return found | {node: region for node, region in added.items() if region is not None}


def is_linear(node: fx.Node) -> bool:
    """Return whether ``node`` multiplies by a weight. The package's ops that do have ``linear`` in their names."""
    return (is_ours(node) and "linear" in op_name(node)) or (node.target in PRODUCTS and not is_mixer(node))


def is_mixer(node: fx.Node) -> bool:
    """Return whether ``node`` combines tokens of a sequence: attention, or a recurrence."""
    return is_ours(node) and any(part in op_name(node) for part in _MIXERS)


def is_ours(node: fx.Node, names: frozenset[str] | None = None) -> bool:
    """Return whether ``node`` calls an op of this package, and with ``names`` one of them."""
    target = node.target
    if not isinstance(target, OpOverload) or target.namespace != "speccompile":
        return False
    return names is None or op_name(node).removeprefix("speccompile.") in names


def op_name(node: fx.Node) -> str:
    """Name of the op or body that ``node`` calls."""
    if isinstance(node.target, str):
        return node.target
    if isinstance(node.target, OpOverload):
        return str(node.target).removesuffix(".default")
    return str(getattr(node.target, "__name__", node.target))


def regions_of_body(graph: StepGraph, body: Body) -> dict[fx.Node, Region]:
    """Region of every call of a body. All calls before the layers are ``embedding``, and all after them ``lm_head``.

    In a decoder layer, ``qkv`` are the inputs of attention (or of a recurrence), ``projection`` the first linear after
    it with the calls in between, and ``mlp`` the rest. Without an op that mixes tokens, all calls are ``layers``.
    """
    calls = [node for node in body.module.graph.nodes if node.op == "call_function"]
    if body.part != "layers":
        return dict.fromkeys(calls, _ENDS[body.part])
    mixers = [node for node in calls if is_mixer(node)]
    if not mixers:
        whole: Region = "layers"
        return dict.fromkeys(calls, whole)
    before = _ancestors(graph, calls, mixers)
    after = _descendants(calls, mixers)
    projections = {node for node in after if is_linear(node)}
    first = next((node for node in calls if node in projections), None)
    if first is not None:
        # Ops that an adapter adds to the projection belong to it.
        first = next((user for user in first.users if is_ours(user, _ADAPTERS)), first)
    between = _ancestors(graph, calls, [first]) | {first} if first is not None else set()
    found: dict[fx.Node, Region] = {}
    for node in calls:
        if node in mixers:
            found[node] = "attention"
        elif node in before:
            found[node] = "qkv"
        elif node in after and node in between:
            found[node] = "projection"
        else:
            found[node] = "mlp"
    return found


def _ancestors(graph: StepGraph, calls: list[fx.Node], of: Iterable[fx.Node]) -> set[fx.Node]:
    """Calls on which ``of`` depend. Writes of tensors that these calls read are included."""
    writers: dict[fx.Node, list[fx.Node]] = {}
    for node in calls:
        for target in written(graph, node):
            writers.setdefault(target, []).append(node)
    found: set[fx.Node] = set()
    stack = list(of)
    while stack:
        for source in stack.pop().all_input_nodes:
            for node in (source, *writers.get(source, ())):
                if node.op == "call_function" and node not in found:
                    found.add(node)
                    stack.append(node)
    return found


def _descendants(calls: list[fx.Node], of: Iterable[fx.Node]) -> set[fx.Node]:
    found = set(of)
    for node in calls:
        if any(source in found for source in node.all_input_nodes):
            found.add(node)
    return found - set(of)

"""Part of a step of each call: the region of the pass that added it, and in a decoder layer by data flow.

No name of a model's module is looked at, so it holds for every family.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from torch import fx

from speccompile.graph.body import Body, Part
from speccompile.graph.stage import CAPTURE
from speccompile.graph.step_graph import StepGraph
from speccompile.graph.verify import written
from speccompile.lowering.pooled import PRODUCTS
from speccompile.ops.cpu.forms import FORMS
from speccompile.passes.base import Pass
from speccompile.report.program_data import Region
from speccompile.utils.torch_private import OpOverload

#: Linears that are C++ ops.
_LINEARS = frozenset(
    op._schema.name.partition("::")[2] for form in FORMS.values() for op in (form.linear, form.linears)
) | {"native_expert_linear"}
#: What adapters add to linears.
_ADAPTERS = frozenset({"lora", "native_lora"})
_ENDS: dict[Part, Region] = {"prologue": "embedding", "epilogue": "lm_head"}
#: What of an op's name says that it mixes the tokens of a sequence.
_MIXERS = ("attention", "causal_conv", "gated_delta_rule", "selective_scan")


def regions_of_passes(passes: Iterable[Pass]) -> dict[str, Region | None]:
    """By name of the pass, and of the capture; None is the model."""
    found: dict[str, Region | None] = {CAPTURE: None}
    for item in passes:
        if item.region != "model":
            found[item.name] = item.region
        else:
            found[item.name] = "other" if item.is_users else None
    return found


def regions_of_step(graph: StepGraph, of_passes: Mapping[str, Region | None]) -> dict[fx.Node, Region]:
    """The region of every call. What was captured, and what passes over the model added, is the model's: before its
    layers the embedding, its layers, and after them the lm_head. What a pass added that ``of_passes`` does not have is
    ``other``."""
    calls = [node for node in graph.graph.nodes if node.op in ("call_function", "call_module")]
    layers = set(graph.anchors.layers)
    added = {node: of_passes.get(node.meta["pass"], "other") for node in calls}
    own = [node for node in calls if added.get(node) is None]
    ends = [place for place, node in enumerate(own) if node in layers]
    # In the captured model a layer is many calls, and its anchor is the last one of them.
    starts = [place for place, node in enumerate(own) if "layer" in node.meta or node in layers]
    first, last = (min(starts, default=len(own)), max(ends, default=-1))
    found: dict[fx.Node, Region] = {}
    for place, node in enumerate(own):
        found[node] = "embedding" if place < first else "layers" if place <= last else "lm_head"
    return found | {node: region for node, region in added.items() if region is not None}


def is_linear(node: fx.Node) -> bool:
    """Whether it multiplies by a weight."""
    return is_ours(node, _LINEARS) or (node.target in PRODUCTS and not is_mixer(node))


def is_mixer(node: fx.Node) -> bool:
    """Whether tokens of a sequence meet in it: attention, or a recurrence."""
    return is_ours(node) and any(part in op_name(node) for part in _MIXERS)


def is_ours(node: fx.Node, names: frozenset[str] | None = None) -> bool:
    """Whether it calls an op of this package, one of ``names``."""
    target = node.target
    if not isinstance(target, OpOverload) or target.namespace != "speccompile":
        return False
    return names is None or op_name(node).removeprefix("speccompile.") in names


def op_name(node: fx.Node) -> str:
    """Of the op or the body that it calls."""
    if isinstance(node.target, str):
        return node.target
    if isinstance(node.target, OpOverload):
        return str(node.target).removesuffix(".default")
    return str(getattr(node.target, "__name__", node.target))


def regions_of_body(graph: StepGraph, body: Body) -> dict[fx.Node, Region]:
    """The region of every call of a body: the whole of ``embedding`` or ``lm_head`` for what stands around the layers.

    Of a decoder layer, ``qkv`` is what attention (or a recurrence) depends on, ``projection`` the first linear after it
    and what lies between them, ``mlp`` the rest. Without an op that mixes tokens all of it is ``layers``.
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
        # What an adapter adds to it belongs to it.
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
    """What ``of`` depend on, writes of tensors that they read included."""
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

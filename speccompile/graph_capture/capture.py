"""Exports a Hugging Face causal LM as a step graph with symbolic rows and width."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.export.graph_signature import InputKind
from transformers import PreTrainedModel

from speccompile.errors import CaptureError, SpecCompileError
from speccompile.graph_capture.anchors import ModulePaths, find_anchors, layer_of
from speccompile.graph_capture.attention import RecordingCache, SlotCache, captured_attention, running
from speccompile.graph_capture.graph import Port, StepGraph
from speccompile.graph_capture.state import KVShape, Layout
from speccompile.graph_capture.support import ModelInfo
from speccompile.runtime.arena import Arena

aten = torch.ops.aten

KV_PREFIXES = {"keys": "k_", "values": "v_"}


class Step(nn.Module):
    """The target model over the KV arena: tokens and positions in, logits out, KV written in place."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model

    def forward(
        self,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor,
        row_slots: torch.Tensor,
        keys: list[torch.Tensor],
        values: list[torch.Tensor],
    ) -> torch.Tensor:
        """input_ids, position_ids ``[B, T]``; row_slots ``[B]``; returns logits ``[B, T, V]``."""
        cache = SlotCache(keys, values, row_slots, position_ids)
        with running(cache):
            result = self.model(input_ids=input_ids, position_ids=position_ids, past_key_values=cache, use_cache=True)
        logits: torch.Tensor = result.logits
        return logits


def observe_kv(model: PreTrainedModel, info: ModelInfo) -> list[KVShape]:
    """Run the model on fake tensors and return the shapes of each layer's keys and values."""
    cache = RecordingCache()
    with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
        tokens = torch.zeros((1, 3), dtype=torch.int64, device=info.device)
        model(input_ids=tokens, past_key_values=cache, use_cache=True)
    layers = sorted(cache.observed)
    if layers != list(range(info.num_layers)):
        raise CaptureError(f"{info.name} wrote KV for layers {layers}, expected 0 .. {info.num_layers - 1}")
    return [cache.observed[layer] for layer in layers]


def capture(model: PreTrainedModel, info: ModelInfo, arena: Arena) -> StepGraph:
    """Capture one forward of ``model`` over the arena, whose KV tensors export traces with.

    Returns:
        A graph with the inputs ``input_ids`` and ``position_ids`` (``[B, T]``) and ``row_slots`` (``[B]``), the output
        ``logits``, and the facts ``captured`` and ``logits``. Its sizes are two primes found nowhere else in the model,
        so a size that varies can be told from one that does not.

    Raises:
        CaptureError: export failed, or left something that is no port.
        AnchorError: a place that passes need was not found.
    """
    layout = arena.layout
    rows, width = _example_sizes(model, layout)
    device = info.device
    tokens = torch.zeros((rows, width), dtype=torch.int64, device=device)
    positions = torch.arange(width, device=device).repeat(rows, 1)
    slots = torch.zeros(rows, dtype=torch.int64, device=device)
    keys = [arena[f"k_{layer}"] for layer in range(info.num_layers)]
    values = [arena[f"v_{layer}"] for layer in range(info.num_layers)]
    dynamic = torch.export.Dim.DYNAMIC
    both = {0: dynamic, 1: dynamic}
    shapes = (both, both, {0: dynamic}, [None] * len(keys), [None] * len(values))
    with captured_attention(model), torch.no_grad():
        try:
            program = torch.export.export(
                Step(model), (tokens, positions, slots, keys, values), dynamic_shapes=shapes, strict=False
            )
        except SpecCompileError:
            raise
        except Exception as error:
            raise CaptureError(f"torch.export could not capture {info.name}: {error}") from error
    graph = program.graph_module.graph
    _clean(graph)
    paths = ModulePaths.of(model, prefix="model.")
    ports = dict(_ports(graph, program.graph_signature, model, info, layout, {"B": rows, "T": width}))
    anchors = find_anchors(graph, paths, info.num_layers)
    step = StepGraph(
        graph=graph,
        ports=ports,
        anchors=anchors,
        layout=layout,
        device=device,
        sizes={"B": rows, "T": width},
        facts={"captured", "logits"},
    )
    for node in graph.nodes:
        layer = layer_of(node, paths) if node.op == "call_function" else None
        node.meta = {"pass": "capture"} if layer is None else {"pass": "capture", "layer": layer}
    step.remove_dead_code()
    step.name_value("logits", anchors.lm_head)
    step.propagate()
    return step


def _example_sizes(model: PreTrainedModel, layout: Layout) -> tuple[int, int]:
    """Two primes clear of every size of the model and the arena; export would guard on an accidental equality."""
    taken = {size for tensor in [*model.parameters(), *model.buffers()] for size in tensor.shape}
    taken |= {size for tensor in layout.tensors.values() for size in tensor.shape}
    taken |= {value for value in model.config.to_dict().values() if isinstance(value, int)}
    free = (n for n in range(11, 1000) if n not in taken and all(n % d for d in range(2, int(n**0.5) + 1)))
    return next(free), next(free)


def _clean(graph: fx.Graph) -> None:
    """Drop what export adds for its own checks, and casts and slices that change nothing."""
    for node in list(graph.nodes):
        if node.op != "call_function":
            continue
        if node.target in (aten._assert_tensor_metadata.default, aten._assert_scalar.default):
            graph.erase_node(node)
        elif _changes_nothing(node):
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)
    graph.eliminate_dead_code()


def _changes_nothing(node: fx.Node) -> bool:
    args: tuple[Any, ...] = node.args
    if node.target in (aten.to.dtype, aten.to.device, aten.to.dtype_layout):
        before, after = args[0].meta["val"], node.meta["val"]
        return bool(before.dtype == after.dtype and before.device == after.device)
    if node.target is aten.slice.Tensor:
        bounds = dict(zip(("start", "stop", "step"), args[2:], strict=False))
        return bounds.get("start") in (0, None) and bounds.get("stop") in (None, 2**63 - 1) and len(bounds) < 3
    return False


def input_ports(layout: Layout, device: torch.device, sizes: Mapping[str, int]) -> dict[str, Port]:
    """The ports of a captured graph's inputs, at the example sizes B and T."""
    both, int64 = (sizes["B"], sizes["T"]), torch.int64
    last_place = max(1, layout.cache_len - sizes["T"])
    return {
        "input_ids": Port("input_ids", "input", both, int64, device, high=layout.vocab_size),
        "position_ids": Port("position_ids", "input", both, int64, device, high=last_place, distinct=True),
        "row_slots": Port("row_slots", "input", both[:1], int64, device, high=layout.max_batch + 1, distinct=True),
    }


def _ports(
    graph: fx.Graph,
    signature: torch.export.ExportGraphSignature,
    model: PreTrainedModel,
    info: ModelInfo,
    layout: Layout,
    sizes: dict[str, int],
) -> Iterator[tuple[str, Port]]:
    """A port for every placeholder, which is renamed to what the arena or the model calls it."""
    tensors = {**dict(model.named_parameters(remove_duplicate=False)), **dict(model.named_buffers())}
    specs = {spec.arg.name: spec for spec in signature.input_specs}
    inputs = input_ports(layout, info.device, sizes)
    for node in graph.find_nodes(op="placeholder"):
        spec = specs[node.name]
        if spec.kind in (InputKind.PARAMETER, InputKind.BUFFER):
            path = str(spec.target).removeprefix("model.")
            value = tensors[path].detach()
            name = path.replace(".", "_")
            port = Port(name, "weight", tuple(value.shape), value.dtype, info.device, path=path, value=value)
        elif spec.kind is InputKind.USER_INPUT and node.name in inputs:
            port = inputs[node.name]
        elif spec.kind is InputKind.USER_INPUT:
            kind, _, layer = node.name.rpartition("_")
            tensor = layout.tensors[f"{KV_PREFIXES[kind]}{layer}"]
            port = Port.of_state(tensor, info.device)
        else:
            raise CaptureError(
                f"export of {info.name} left the tensor {node.name!r} as {spec.kind.name.lower()}; "
                "a step graph takes every tensor through a port"
            )
        node._rename(port.name)
        node.target = node.name
        yield node.name, replace(port, name=node.name)

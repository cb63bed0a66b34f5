"""Export of a Hugging Face causal LM as a step graph with symbolic rows and width."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import fx, nn
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode, free_unbacked_symbols
from transformers import PreTrainedModel

from speccompile.errors import SpecCompileError, UnsupportedModel, error_line
from speccompile.graph.layer_state import SOURCE_LENGTH, cross_names, index_name, recurrent_names
from speccompile.graph.stage import CAPTURE
from speccompile.graph.state import Layout, StateTensor, primes_clear_of
from speccompile.graph.step_graph import StepGraph
from speccompile.graph_capture.alibi import alibi_captured
from speccompile.graph_capture.altering import altering
from speccompile.graph_capture.anchors import ModulePaths, find_anchors, layer_of
from speccompile.graph_capture.attention import Running, captured_by, running
from speccompile.graph_capture.cache import Recurrent, SlotCache
from speccompile.graph_capture.clean import clean_graph
from speccompile.graph_capture.counted_positions import own_positions
from speccompile.graph_capture.cross_cache import SlotCross, with_cross
from speccompile.graph_capture.decoder_positions import decoder_positions_captured, share_biases
from speccompile.graph_capture.encoder_decoder import EncoderOutput, accepts, decode
from speccompile.graph_capture.experts import experts_captured
from speccompile.graph_capture.export import exported
from speccompile.graph_capture.key_index import share_choices, symbolic_counts
from speccompile.graph_capture.lightning import lightning_captured
from speccompile.graph_capture.masks import MaskLog
from speccompile.graph_capture.model_info import ModelInfo, is_quantised
from speccompile.graph_capture.observe import ModuleTracker, Observation, extra_inputs, uses_cache
from speccompile.graph_capture.ports import input_ports, kv_names, name_ports
from speccompile.graph_capture.recurrence import recurrences_captured
from speccompile.graph_capture.rope_positions import has_parts, of_text
from speccompile.graph_capture.rotary import changing_tables, fixed_rotary
from speccompile.utils.torch_private import check_size
from speccompile.utils.tracer_isolation import silenced
from speccompile.utils.transformers_version import cache_argument


class Step(nn.Module):
    """The target model over the KV arena: tokens and positions in, logits out, KV written in place."""

    def __init__(self, model: PreTrainedModel, observed: Observation, vocab_size: int) -> None:
        super().__init__()
        self.model = model
        self.observed = observed
        self.vocab_size = vocab_size

    def forward(
        self,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor,
        row_slots: torch.Tensor,
        keys: list[torch.Tensor],
        values: list[torch.Tensor],
        index: list[torch.Tensor],
        recurrent: list[torch.Tensor],
        row_absorbed: torch.Tensor,
        row_settled: torch.Tensor,
        row_prompt: torch.Tensor,
        rope_positions: torch.Tensor,
        cross_keys: list[torch.Tensor],
        cross_values: list[torch.Tensor],
        source_length: list[torch.Tensor],
    ) -> torch.Tensor:
        """Run the model on input_ids and position_ids ``[B, T]``, and row_slots, row_absorbed, row_settled and
        row_prompt ``[B]``, and rope_positions ``[PARTS, B, T]``. Returns logits ``[B, T, V]``."""
        share_sizes((input_ids, position_ids), (0, 1))
        share_sizes((input_ids, row_slots, row_absorbed, row_settled, row_prompt), (0,))
        if has_parts(self.model):
            share_sizes((input_ids, rope_positions[0]), (0, 1))
        if keys:
            share_sizes((*keys, *values, *index), (0, 1))
        if cross_keys:
            share_sizes((keys[0], *cross_keys, *cross_values, *source_length), (0,))
        route, layers = self.observed.route, self.observed.kv
        by_layer = dict(zip(layers, keys, strict=True)), dict(zip(layers, values, strict=True))
        by_name = dict(zip(recurrent_names(self.observed.recurrent), recurrent, strict=True))
        own = Recurrent(by_name, row_absorbed, row_settled, row_prompt) if by_name else None
        of_index = dict(zip(self.observed.index, index, strict=True))
        gather = route == "eager"
        cache = SlotCache(*by_layer, row_slots, position_ids, gather=gather, recurrent=own, index=of_index)
        cache_len = None if by_name else keys[0].shape[1]
        extra: dict[str, Any] = extra_inputs(self.model, route, position_ids, cache_len, rope_positions)
        cross, source = None, None
        if cross_keys:
            lengths, crossing = source_length[0][row_slots], self.observed.cross
            by_key, by_value = (dict(zip(crossing, each, strict=True)) for each in (cross_keys, cross_values))
            cross = SlotCross(by_key, by_value, lengths, row_slots, position_ids, gather)
            # Only its sizes are read: keys and values are in the cache.
            states = keys[0].new_zeros((input_ids.shape[0], cross_keys[0].shape[1], 1))
            source = EncoderOutput(states, lengths)
        with running(Running(cache, position_ids, MaskLog(self.observed.masks), cross)):
            extra |= {cache_argument(self.model): with_cross(cache, cross)}
            result = decode(self.model, source, input_ids=input_ids, use_cache=uses_cache(self.model), **extra)
        logits: torch.Tensor = result.logits
        if logits.shape[-1] < self.vocab_size:
            # Token ids of prompts, options and drafts index the logits, also ids that the lm_head cannot choose.
            logits = F.pad(logits, (0, self.vocab_size - logits.shape[-1]), value=float("-inf"))
        return logits


def share_sizes(tensors: Sequence[torch.Tensor], dims: Sequence[int]) -> None:
    """Declare to export that these dimensions have one size, and are not equal by accident."""
    for tensor in tensors[1:]:
        for dim in dims:
            check_size(tensor.shape[dim] == tensors[0].shape[dim])


def capture(model: PreTrainedModel, info: ModelInfo, observed: Observation, layout: Layout) -> StepGraph:
    """Capture one forward of ``model`` over a KV arena with the given layout.

    Returns:
        A graph with the inputs ``input_ids`` and ``position_ids`` (``[B, T]``) and ``row_slots`` (``[B]``), for a
        recurrent state also ``row_absorbed``, ``row_settled`` and ``row_prompt`` (``[B]``), for rotary positions of
        several parts ``rope_positions`` (``[PARTS, B, T]``), the output ``logits``, and the facts ``captured`` and
        ``logits``. Its B and T are two primes that occur nowhere else in the model, so a
        variable size differs from every constant one. N and S are those of the layout.

    Raises:
        UnsupportedModel: export failed; the error names the module.
        CaptureError: the exported graph has an input that is not a port.
        AnchorError: an anchor that passes need was not found.
    """
    rows, width, slots, cache_len = example_sizes(model, _numbers(model), layout)
    program = _export(model, info, observed, layout, (rows, width, slots, cache_len))
    graph = program.graph_module.graph
    clean_graph(graph)
    paths = ModulePaths.of(model, prefix="model.")
    inputs = input_ports(layout, info.device, {"B": rows, "T": width})
    states = kv_names(list(observed.kv))
    states |= {f"index_{number}": index_name(layer) for number, layer in enumerate(observed.index)}
    states |= {f"recurrent_{number}": name for number, name in enumerate(recurrent_names(observed.recurrent))}
    for kind, names in zip(("keys", "values"), cross_names(observed.cross), strict=True):
        states |= {f"cross_{kind}_{number}": name for number, name in enumerate(names)}
    states[f"{SOURCE_LENGTH}_0"] = SOURCE_LENGTH
    ports = name_ports(graph, program, model, info, states, layout, inputs, changing_tables(model))
    if observed.index:
        share_choices(graph, paths)
    if observed.cross:
        share_biases(graph, paths)
    anchors = find_anchors(graph, paths, info.num_layers)
    step = StepGraph(
        graph=graph,
        ports=ports,
        anchors=anchors,
        layout=layout,
        device=info.device,
        sizes={"B": rows, "T": width},
        facts={"captured", "logits"},
        route=observed.route,
    )
    note_layers(graph, paths)
    (logits,) = cast(Any, step.output.args[0])
    step.remove_dead_code()
    step.name_value("logits", logits)
    try:
        step.propagate()
    except RuntimeError as error:
        raise UnsupportedModel(
            model=info.name,
            reason=f"its shapes do not fit a cache of {layout.cache_len} positions ({error_line(error)}); "
            f"use a smaller max_len (now {layout.max_len})",
        ) from error
    return step if accepts(model, "position_ids") else own_positions(step)


def _export(
    model: PreTrainedModel, info: ModelInfo, observed: Observation, layout: Layout, sizes: tuple[int, int, int, int]
) -> torch.export.ExportedProgram:
    device = info.device
    rows, width, slots, cache_len = sizes

    def example(size: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty((slots, cache_len, *size), dtype=dtype, device=device)

    kept = [layout.tensors[name] for name in recurrent_names(observed.recurrent)]
    crossing = [[layout.tensors[name] for name in names] for names in cross_names(observed.cross)]

    def of_slots(tensors: Sequence[StateTensor]) -> list[torch.Tensor]:
        return [torch.empty((slots, *tensor.shape[1:]), dtype=tensor.dtype, device=device) for tensor in tensors]

    positions = torch.arange(width, device=device).repeat(rows, 1)
    inputs = (
        torch.zeros((rows, width), dtype=torch.int64, device=device),
        positions,
        torch.zeros(rows, dtype=torch.int64, device=device),
        [example(shape.key, shape.dtype) for shape in observed.kv.values()],
        [example(shape.value, shape.dtype) for shape in observed.kv.values()],
        [example((shape.size,), shape.dtype) for shape in observed.index.values()],
        of_slots(kept),
        *(torch.zeros(rows, dtype=torch.int64, device=device) for _ in range(3)),
        of_text(positions).contiguous(),
        *map(of_slots, crossing),
        of_slots([layout.tensors[SOURCE_LENGTH]] if observed.cross else []),
    )
    dynamic = torch.export.Dim.DYNAMIC
    both, first = {0: dynamic, 1: dynamic}, {0: dynamic}
    layers = [both] * len(observed.kv)
    recurrent, parts = [first] * len(kept), {1: dynamic, 2: dynamic}
    crosses = [first] * len(observed.cross)
    shapes = (
        *(both, both, first, layers, layers, [both] * len(observed.index), recurrent, first, first, first, parts),
        *(crosses, crosses, [first] if crosses else []),
    )
    tracker = ModuleTracker(model)
    with (
        altering(model),
        captured_by(model, observed.route),
        alibi_captured(model, observed.route),
        recurrences_captured(model),
        lightning_captured(model),
        experts_captured(model),
        symbolic_counts(model) if observed.index else contextlib.nullcontext(),
        fixed_rotary(model),
        decoder_positions_captured(model) if observed.cross else contextlib.nullcontext(),
        tracker.followed(),
    ):
        try:
            # torch prints the unfinished graph to stderr before it raises.
            with silenced():
                program = exported(Step(model, observed, info.vocab_size), inputs, shapes, info.num_layers)
        except SpecCompileError:
            raise
        except GuardOnDataDependentSymNode as error:
            raise _untraceable(model, info, f"{tracker}computes sizes from data (an expert loop?)") from error
        except Exception as error:
            raise _untraceable(model, info, f"{tracker}cannot be exported: {error_line(error)}") from error
    for node in program.graph.nodes:
        if free_unbacked_symbols(node.meta.get("val")):
            path, kind = (list(node.meta.get("nn_module_stack", {}).values()) or [("it", "")])[-1]
            where = f"{path.removeprefix('model.')} ({str(kind).rpartition('.')[2]})"
            raise _untraceable(model, info, f"{where} computes sizes from data ({node.target})")
    return program


def _untraceable(model: PreTrainedModel, info: ModelInfo, reason: str) -> UnsupportedModel:
    if is_quantised(model):
        reason = f"its weights are quantised and do not trace, load it unquantised ({reason})"
    return UnsupportedModel(model=info.name, reason=reason)


def _numbers(model: PreTrainedModel) -> set[int]:
    fields = model.config.get_text_config(decoder=True).to_dict().values()
    return {value for value in fields if isinstance(value, int)}


def example_sizes(module: nn.Module, numbers: set[int], layout: Layout) -> tuple[int, int, int, int]:
    """Return primes for B, T, N and S that divide neither a size of ``module`` nor a number of ``numbers``. Export
    would guard on an accidental equality."""
    taken = {size for tensor in [*module.parameters(), *module.buffers()] for size in tensor.shape}
    free = primes_clear_of(taken | numbers | layout.sizes)
    return next(free), next(free), next(free), next(free)


def note_layers(graph: fx.Graph, paths: ModulePaths) -> None:
    """Reduce the metadata of each node to its decoder layer."""
    for node in graph.nodes:
        layer = layer_of(node, paths) if node.op == "call_function" else None
        node.meta = {"pass": CAPTURE} if layer is None else {"pass": CAPTURE, "layer": layer}

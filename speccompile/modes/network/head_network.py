"""A draft head as a drafter: capture as a graph, storage, and comparison with the head's own forward."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, cast

import torch
from torch import nn

from speccompile.errors import CaptureError, CaptureMismatch, LoweringError, error_line
from speccompile.graph.arena import Arena
from speccompile.graph.layer_state import KVShape
from speccompile.graph.port import Port
from speccompile.graph.state import Layout
from speccompile.graph.step_graph import Route, StepGraph
from speccompile.graph_capture.anchors import ModulePaths, find_anchors
from speccompile.graph_capture.capture import example_sizes, note_layers, share_sizes
from speccompile.graph_capture.check import TOLERANCE
from speccompile.graph_capture.clean import clean_graph
from speccompile.graph_capture.export import exported
from speccompile.graph_capture.model_info import ModelInfo
from speccompile.graph_capture.packed_forward import inputs_unrounded
from speccompile.graph_capture.ports import input_ports, kv_names, name_ports
from speccompile.graph_capture.store import HeadStore
from speccompile.modes.network.draft_head import DraftHead, HeadCache
from speccompile.modes.network.draft_network import DraftNetwork, Run
from speccompile.modes.network.head_probe import HeadProbe
from speccompile.ops.cpu.packing import WeightPacks
from speccompile.ops.cpu.rounded import check_kernels
from speccompile.utils.storage import Storage
from speccompile.utils.torch_private import pytree
from speccompile.utils.tracer_isolation import copy_over_same_tensors
from speccompile.utils.weight_forms import WeightForm

#: State of heads: the output of their layers at a sequence's newest row. Drafting starts from it.
NEWEST_ROW = "newest"


class _Step(nn.Module):
    def __init__(self, head: DraftHead) -> None:
        super().__init__()
        self.model = head

    def forward(
        self,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor,
        row_slots: torch.Tensor,
        hidden_states: torch.Tensor,
        keys: list[torch.Tensor],
        values: list[torch.Tensor],
    ) -> dict[str, torch.Tensor]:
        share_sizes((input_ids, position_ids, hidden_states), (0, 1))
        share_sizes((input_ids, row_slots), (0,))
        share_sizes((*keys, *values), (0, 1))
        layers = list(self.model.kv)
        by_layer = dict(zip(layers, keys, strict=True)), dict(zip(layers, values, strict=True))
        cache = HeadCache(*by_layer, row_slots, position_ids)
        results: dict[str, torch.Tensor] = self.model(input_ids, position_ids, hidden_states, cache)
        return results


class HeadNetwork(DraftNetwork):
    """A :class:`DraftHead` as a drafter.

    Args:
        head: the head, in eval mode, on the target's device.
        info: ``vocab_size`` is the vocabulary that the head reads, ``num_layers`` the number of its layers.
        max_len: the largest number of tokens of a sequence that it drafts for.
        weights: the form of its linears' weights.
    """

    def __init__(self, head: DraftHead, info: ModelInfo, max_len: int, weights: WeightForm = "same") -> None:
        super().__init__(info, max_len, weights)
        self.head = head
        # Created here: its key includes weights that the head shares with the target, and later passes can change
        # those.
        self._store = HeadStore(head, info)

    @property
    def module(self) -> nn.Module:
        return self.head

    @property
    def kv(self) -> Mapping[int, KVShape]:
        return self.head.kv

    @property
    def places_per_row(self) -> int:
        return self.head.places_per_row

    @property
    def route(self) -> Route:
        return self.head.route

    def capture(self, layout: Layout, storage: Storage | None) -> tuple[StepGraph, bool]:
        known = None if storage is None else self._store.load(layout, storage)
        return (self._export(layout), False) if known is None else (known, True)

    def store(self, graph: StepGraph, storage: Storage) -> None:
        self._store.save(graph, storage)

    def _export(self, layout: Layout) -> StepGraph:
        head, info = self.head, self.info
        rows, width, slots, places = example_sizes(head, head.numbers, layout)

        def cache(size: tuple[int, int], dtype: torch.dtype) -> torch.Tensor:
            return torch.empty((slots, places, *size), dtype=dtype, device=info.device)

        hidden = torch.zeros((rows, width, head.hidden_size), dtype=info.dtype, device=info.device)
        arguments = (
            torch.zeros((rows, width), dtype=torch.int64, device=info.device),
            torch.arange(width, device=info.device).repeat(rows, 1),
            torch.zeros(rows, dtype=torch.int64, device=info.device),
            hidden,
            [cache(shape.key, shape.dtype) for shape in self.kv.values()],
            [cache(shape.value, shape.dtype) for shape in self.kv.values()],
        )
        dynamic = torch.export.Dim.DYNAMIC
        both = {0: dynamic, 1: dynamic}
        shapes = (both, both, {0: dynamic}, both, [both] * len(self.kv), [both] * len(self.kv))
        try:
            program = exported(copy_over_same_tensors(_Step(head)), arguments, shapes, len(self.kv))
        except Exception as error:
            raise CaptureError(f"the head {info.name} cannot be exported: {error_line(error)}") from error
        graph = program.graph_module.graph
        clean_graph(graph)
        paths = ModulePaths("model.layers", "model.lm_head")
        sizes = {"B": rows, "T": width}
        inputs = input_ports(layout, info.device, sizes)
        inputs["hidden_states"] = Port("hidden_states", "input", tuple(hidden.shape), info.dtype, info.device)
        ports = name_ports(graph, program, head, info, kv_names(list(self.kv)), layout, inputs, ())
        captured = StepGraph(
            graph=graph,
            ports=ports,
            anchors=find_anchors(graph, paths, len(head.layers)),
            layout=layout,
            device=info.device,
            sizes=sizes,
            facts={"captured", "logits"},
            route=self.route,
        )
        note_layers(graph, paths)
        outputs = cast(Any, captured.output.args[0])
        captured.remove_dead_code()
        assert program.call_spec.out_spec is not None
        for name, node in pytree.tree_unflatten(outputs, program.call_spec.out_spec).items():
            captured.name_value(name, node)
        captured.propagate()
        return captured

    def check(
        self, graph: StepGraph, arena: Arena, lowered: Run, reference: Callable[[StepGraph], Run], packs: WeightPacks
    ) -> float:
        """Compare the graph with the head's own forward, on random inputs in pieces. Returns the largest difference."""
        probe = HeadProbe(self.head, self, graph, arena)
        check_kernels(packs)
        with torch.no_grad(), inputs_unrounded(self.head, packs):
            expected = probe.own()
            allowed = TOLERANCE[self.info.dtype] * max(float(piece.abs().max()) for piece in expected)
            difference = probe.difference(lowered, expected)
            if difference <= allowed:
                return difference
            captured = probe.difference(reference(graph), expected)
        if captured <= allowed:
            reason = f"the compiled head differs from the captured one by {difference:.3g} (allowed {allowed:.3g})"
            raise LoweringError(f"{reason}; use backend='eager'", difference=difference, allowed=allowed)
        raise CaptureMismatch(model=self.info.name, difference=captured, allowed=allowed, where="of the draft head")

"""Draft heads: small networks that read the target's hidden states, and are not transformers models."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, cast

import torch
from torch import nn

import speccompile.ops  # noqa: F401  registers torch.ops.speccompile
from speccompile.errors import CaptureError, CaptureMismatch, LoweringError, error_line
from speccompile.graph.arena import Arena
from speccompile.graph.port import Port
from speccompile.graph.state import KVShape, Layout
from speccompile.graph.step_graph import Route, StepGraph
from speccompile.graph_capture.anchors import ModulePaths, find_anchors
from speccompile.graph_capture.capture import (
    clean_graph,
    example_sizes,
    input_ports,
    kv_names,
    name_ports,
    note_layers,
    share_sizes,
)
from speccompile.graph_capture.check import TOLERANCE
from speccompile.graph_capture.export import exported
from speccompile.graph_capture.model_info import ModelInfo
from speccompile.graph_capture.store import HeadStore
from speccompile.modes.network.draft_network import DraftNetwork, Run
from speccompile.ops.cpu.packing import WeightPacks
from speccompile.ops.cpu.rounded import check_kernels, inputs_unrounded
from speccompile.utils.storage import Storage
from speccompile.utils.torch_private import pytree
from speccompile.utils.tracer_isolation import module_twin
from speccompile.utils.weight_forms import WeightForm

# Rows of the check, and the widths of its pieces, as many as fit.
ROWS, PIECES = 2, (3, 1, 5)


class RowAttention(Protocol):
    """How a head's layers attend. Inference is :class:`HeadCache`; training has another one."""

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scale: float,
        window: int | None = None,
    ) -> torch.Tensor:
        """Keep ``key`` and ``value`` ``[B, T, G, D]`` of these rows, and attend with ``query`` ``[B, T, H, D]`` to what
        is kept of the rows' sequences; returns ``[B, T, H, Dv]``. Positions are already in them."""


@dataclass
class HeadCache:
    """The head's KV: each layer writes its KV and attends to that of its row.

    Args:
        keys, values: by layer, ``[N, S, G, D]`` and ``[N, S, G, Dv]``.
        slots: int64 ``[B]``.
        positions: int64 ``[B, T]``.
    """

    keys: Mapping[int, torch.Tensor]
    values: Mapping[int, torch.Tensor]
    slots: torch.Tensor
    positions: torch.Tensor

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scale: float,
        window: int | None = None,
    ) -> torch.Tensor:
        """``query`` ``[B, T, H, D]``, ``key`` and ``value`` ``[B, T, G, D]``, positions already in them; returns ``[B,
        T, H, Dv]``. A query attends to the last ``window`` places up to its own, or to all of them."""
        keys, values = self.write(layer, key, value)
        return torch.ops.speccompile.attention(query, keys, values, self.slots, self.positions, scale, window)

    def write(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keep ``key`` and ``value`` ``[B, T, G, D]`` of these rows; returns all that is kept of the layer."""
        place = (self.slots.unsqueeze(1), self.positions)
        self.keys[layer].index_put_(place, key)
        self.values[layer].index_put_(place, value)
        return self.keys[layer], self.values[layer]


class DraftHead(nn.Module):
    """The base of heads that can be captured. The forward takes the sizes that vary (B, T) from its tensors, and no
    Python decision depends on a value.

    Attributes:
        layers: its decoder layers, called as modules; each hands one tensor on.
        lm_head: a module, called once, after the layers.
    """

    layers: nn.ModuleList
    lm_head: nn.Module

    @property
    @abstractmethod
    def hidden_size(self) -> int:
        """M of the hidden states that it reads."""

    @property
    @abstractmethod
    def kv(self) -> Mapping[int, KVShape]:
        """The KV shapes of each layer."""

    @property
    def route(self) -> Route:
        """How its layers attend: ``eager`` layers read the whole cache of their rows."""
        return "attention"

    @property
    def numbers(self) -> set[int]:
        """The sizes of its forward that are not those of its weights."""
        return {self.hidden_size}

    @property
    def places_per_row(self) -> int:
        """How many places a row of its forward writes; positions are so far from the end of the KV."""
        return 1

    @abstractmethod
    def forward(
        self, input_ids: torch.Tensor, position_ids: torch.Tensor, hidden_states: torch.Tensor, cache: HeadCache
    ) -> dict[str, torch.Tensor]:
        """``input_ids``, ``position_ids`` ``[B, T]``, ``hidden_states`` ``[B, T, M]``; returns the
        values that passes may read or replace, by name: ``logits`` ``[B, T, Vd]`` and others (``hidden``, ``fused``,
        ...)."""


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
        head: in eval mode, on the target's device.
        info: ``vocab_size`` is the head's own, ``num_layers`` how many layers it has.
        max_len: most tokens of a text that it drafts for.
        weights: the form of its linears' weights.
    """

    def __init__(self, head: DraftHead, info: ModelInfo, max_len: int, weights: WeightForm = "same") -> None:
        super().__init__(info, max_len, weights)
        self.head = head
        # Created here, before the target's weights that it shares can change: they are part of its key.
        self._store = HeadStore(head, info)

    @property
    def module(self) -> nn.Module:
        return self.head

    @property
    def kv(self) -> Mapping[int, KVShape]:
        return self.head.kv

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
            program = exported(module_twin(_Step(head)), arguments, shapes)
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
        """Compare the graph with the head's own forward over random inputs in pieces. Returns the largest
        difference."""
        probe = _Probe(self, graph, arena)
        check_kernels(packs)
        with torch.no_grad(), inputs_unrounded(packs):
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


class _Probe:
    """Random tokens and hidden states, as the head itself and its graph read them."""

    def __init__(self, network: HeadNetwork, graph: StepGraph, arena: Arena) -> None:
        info, places = network.info, network.layout(arena.layout).cache_len
        length = min(sum(PIECES), places // network.head.places_per_row)
        generator = torch.Generator().manual_seed(0)
        self.network, self.graph, self.arena = network, graph, arena
        vocab = arena.layout.vocab_size
        self.tokens = torch.randint(vocab, (ROWS, length), generator=generator).to(info.device)
        hidden = torch.randn((ROWS, length, network.head.hidden_size), generator=generator)
        self.hidden = hidden.to(info.device, info.dtype)
        # The second row uses the dummy slot, which no request owns.
        self.slots = torch.tensor([0, arena.layout.dummy_slot], device=info.device)

    def pieces(self) -> list[dict[str, torch.Tensor]]:
        found, start = [], 0
        for width in PIECES:
            stop = max(start, min(start + width, self.tokens.shape[1]))
            places = torch.arange(start, stop, device=self.tokens.device)
            found.append(
                {
                    "input_ids": self.tokens[:, places],
                    "position_ids": places.repeat(ROWS, 1),
                    "row_slots": self.slots,
                    "hidden_states": self.hidden[:, places],
                }
            )
            start += width
        return [piece for piece in found if piece["input_ids"].shape[1]]

    def own(self) -> list[torch.Tensor]:
        """Logits of each piece."""
        layout, device = self.network.layout(self.arena.layout).tensors, self.tokens.device
        kv = {
            name: torch.zeros((ROWS, *tensor.shape[1:]), dtype=tensor.dtype, device=device)
            for name, tensor in layout.items()
        }
        rows = torch.arange(ROWS, device=device)
        logits = []
        for piece in self.pieces():
            keys = {layer: kv[f"k_{layer}"] for layer in self.network.kv}
            values = {layer: kv[f"v_{layer}"] for layer in self.network.kv}
            cache = HeadCache(keys, values, rows, piece["position_ids"])
            inputs = (piece["input_ids"], piece["position_ids"], piece["hidden_states"])
            logits.append(self.network.head(*inputs, cache)["logits"])
        return logits

    def difference(self, run: Run, expected: list[torch.Tensor]) -> float:
        worst = 0.0
        for piece, own in zip(self.pieces(), expected, strict=True):
            arguments = []
            for node in self.graph.placeholders:
                port = self.graph.ports[node.name]
                value = piece[node.name] if port.role == "input" else port.value
                arguments.append(self.arena[node.name] if value is None else value)
            (result,) = [
                value
                for node, value in zip(cast(Any, self.graph.output.args[0]), run(*arguments), strict=True)
                if node is self.graph.values["logits"]
            ]
            change = (result - own).abs().float()
            worst = max(worst, float(torch.where(change.isfinite(), change, torch.inf).max()))
        return worst

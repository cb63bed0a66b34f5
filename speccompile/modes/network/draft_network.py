"""The base class of networks that modes draft with. A network is captured separately, in the same way as the target.

Its graph has the inputs ``input_ids`` and ``position_ids`` ``[B, T]`` and ``row_slots`` ``[B]``, and for a head also
``hidden_states`` ``[B, T, M]``. Its results have names in ``StepGraph.values``. One of them is always ``logits``.
Passes copy the graph into a step with :func:`speccompile.modes.network.passes.forward_drafter`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from torch import nn

from speccompile.graph.arena import Arena
from speccompile.graph.layer_state import KVShape, kv_state
from speccompile.graph.splicing import PREFIX
from speccompile.graph.state import Layout, resolve_layout
from speccompile.graph.step_graph import Route, StepGraph
from speccompile.graph_capture.model_info import ModelInfo
from speccompile.ops.cpu.packing import WeightPacks
from speccompile.utils.storage import Storage
from speccompile.utils.weight_forms import WeightForm

Run = Callable[..., Any]


class DraftNetwork(ABC):
    """A network that drafts.

    Args:
        info: its properties; ``name`` is for messages.
        max_len: the largest number of tokens of a sequence that it drafts for.
        weights: the form of its linears' weights.
    """

    def __init__(self, info: ModelInfo, max_len: int, weights: WeightForm = "same") -> None:
        self.info = info
        self.max_len = max_len
        self.weights = weights

    @property
    def windows_stay(self) -> bool:
        """Whether the start of its sliding windows stays fixed while it drafts; see
        :mod:`speccompile.modes.network.draft_windows`."""
        return False

    @property
    def places_per_row(self) -> int:
        """The number of positions that a row of its forward writes in the KV."""
        return 1

    @property
    @abstractmethod
    def module(self) -> nn.Module:
        """The network as a module, as it was given."""

    @property
    @abstractmethod
    def kv(self) -> Mapping[int, KVShape]:
        """The KV shapes of each of its layers."""

    @property
    def route(self) -> Route:
        """The route by which its attention is captured."""
        return "attention"

    @abstractmethod
    def capture(self, layout: Layout, storage: Storage | None) -> tuple[StepGraph, bool]:
        """Its graph over KV of ``layout``, and whether it was read from ``storage``.

        Args:
            storage: the cache of captures; None captures the network anew.

        Raises:
            CaptureError, UnsupportedModel, AnchorError: the network cannot be captured.
        """

    @abstractmethod
    def check(
        self, graph: StepGraph, arena: Arena, lowered: Run, reference: Callable[[StepGraph], Run], packs: WeightPacks
    ) -> float:
        """Compare the finished graph with the network's own forward. Returns the largest difference.

        Raises:
            CaptureMismatch: the captured graph differs from the network's forward.
            LoweringError: only the compiled graph differs.
        """

    @abstractmethod
    def store(self, graph: StepGraph, storage: Storage) -> None:
        """Store ``graph``, the result of :meth:`capture`, after it has passed the check."""

    def layout(self, target: Layout) -> Layout:
        """The layout of its KV ``[N, S, G, D]``. S is its own; the other sizes are those of ``target``."""
        return resolve_layout(
            kv_state(self.kv),
            max_batch=target.max_batch,
            max_len=self.max_len,
            max_draft_len=target.max_draft_len,
            max_width=target.max_width,
            vocab_size=self.info.vocab_size,
        )


def prefixed(layout: Layout) -> Layout:
    """A drafter's layout, with the names that its tensors have in the arena."""
    tensors = {f"{PREFIX}{name}": replace(tensor, name=f"{PREFIX}{name}") for name, tensor in layout.tensors.items()}
    return replace(layout, tensors=tensors)


def with_drafter(target: Layout, network: DraftNetwork) -> Layout:
    """The layout of the arena, with the state of target and drafter."""
    return replace(target, tensors={**target.tensors, **prefixed(network.layout(target)).tensors})

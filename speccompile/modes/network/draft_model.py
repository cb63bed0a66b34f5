"""A causal language model as a drafter for a larger one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cached_property

from torch import nn
from transformers import PreTrainedModel

from speccompile.errors import UnsupportedModel
from speccompile.graph.arena import Arena
from speccompile.graph.layer_state import KVShape
from speccompile.graph.state import Layout
from speccompile.graph.step_graph import Route, StepGraph
from speccompile.graph_capture.capture import capture
from speccompile.graph_capture.check import Probe, check_capture
from speccompile.graph_capture.model_info import ModelInfo
from speccompile.graph_capture.observe import Observation, observe
from speccompile.graph_capture.packed_forward import inputs_unrounded
from speccompile.graph_capture.rotary import settle_rotary
from speccompile.graph_capture.store import CaptureStore
from speccompile.modes.network.draft_network import DraftNetwork, Run
from speccompile.ops.cpu.packing import WeightPacks
from speccompile.ops.cpu.rounded import check_kernels
from speccompile.utils.storage import Storage
from speccompile.utils.tracer_isolation import copy_over_same_tensors
from speccompile.utils.weight_forms import WeightForm


class DraftModel(DraftNetwork):
    """A transformers model as a drafter. ``info`` is the result of :func:`inspect_model`."""

    def __init__(self, model: PreTrainedModel, info: ModelInfo, max_len: int, weights: WeightForm = "same") -> None:
        super().__init__(info, max_len, weights)
        self.model = model

    @cached_property
    def observed(self) -> Observation:
        settle_rotary(self.model)
        observed = observe(copy_over_same_tensors(self.model), self.info)
        if observed.recurrent:
            reason = (
                "it has a recurrent state, and rejected drafts cannot be removed from a drafter's recurrent state; "
                "use a draft model with attention layers only"
            )
            raise UnsupportedModel(model=self.info.name, reason=reason)
        return observed

    @property
    def module(self) -> nn.Module:
        return self.model

    @property
    def kv(self) -> Mapping[int, KVShape]:
        return self.observed.kv

    @property
    def route(self) -> Route:
        return self.observed.route

    def capture(self, layout: Layout, storage: Storage | None) -> tuple[StepGraph, bool]:
        known = None if storage is None else CaptureStore(self.model, self.info, storage).load()
        # The stored capture can be one of the model as a target, by another route.
        if known is not None and known.fits(layout) and known.observed == self.observed:
            return known.graph(layout), True
        return capture(copy_over_same_tensors(self.model), self.info, self.observed, layout), False

    def store(self, graph: StepGraph, storage: Storage) -> None:
        CaptureStore(self.model, self.info, storage).save(graph, self.observed)

    def check(
        self, graph: StepGraph, arena: Arena, lowered: Run, reference: Callable[[StepGraph], Run], packs: WeightPacks
    ) -> float:
        reach = self.max_len if self.observed.counts else self.observed.reach
        with inputs_unrounded(self.model, packs):
            probe = Probe.of(self.model, self.info, arena, reach, self.max_len)
            difference = check_capture(self.model, self.info, graph, arena, lowered, reference, reach, probe)
        check_kernels(packs)
        return difference

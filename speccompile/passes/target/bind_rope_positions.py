"""Rotary positions of several parts, from the positions of a step and each slot's own offset."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from speccompile.graph.step_graph import StepGraph
from speccompile.graph_capture.rope_positions import ROPE_POSITIONS, of_text
from speccompile.multimodal.model_inputs import ROPE_DELTA
from speccompile.passes.base import Changes, Facts, Pass, PassRegion, facts


@dataclass(frozen=True)
class BindRopePositions(Pass):
    """Computes ``rope_positions`` ``[PARTS, B, T]``: all parts are the token's position plus the offset of its slot,
    which images before it leave (transformers' ``rope_deltas``). A drafter has the offsets of the target, or none.
    """

    name: ClassVar[str] = "bind_rope_positions"
    named_values: ClassVar[tuple[str, ...]] = (ROPE_POSITIONS,)
    looks_for: ClassVar[str] = "the input rope_positions"
    region: ClassVar[PassRegion] = "model"
    requires: ClassVar[Facts] = facts("captured")
    provides: ClassVar[Facts] = facts("rope_positions")

    def run(self, graph: StepGraph) -> Changes:
        inputs = {node.name: node for node in graph.placeholders}
        first = next(node for node in graph.graph.nodes if node.op != "placeholder")
        if ROPE_DELTA in graph.layout.tensors:
            read = inputs["position_ids"], graph.state(ROPE_DELTA), inputs["row_slots"]
            positions = graph.insert(shifted, *read, before=first)
        else:
            positions = graph.insert(of_text, inputs["position_ids"], before=first)
        graph.bind_input(ROPE_POSITIONS, positions)
        graph.name_value(ROPE_POSITIONS, positions)
        graph.anchors.start = next(node for node in graph.graph.nodes if node.op != "placeholder")
        return Changes(1, "position and offset of each token")


def shifted(positions: torch.Tensor, delta: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """Rotary positions ``[PARTS, B, T]`` of tokens at ``positions`` ``[B, T]`` of ``slots`` ``[B]``, by the offset
    ``[N]`` of each slot."""
    return of_text(positions + delta[slots][:, None])

"""A prompt chunk that is not the last one emits nothing, so it needs no logits."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from speccompile.graph.step_graph import StepGraph
from speccompile.passes.base import Changes, Facts, Pass, PassRegion, facts
from speccompile.passes.step.tap_hidden import marked


@dataclass(frozen=True)
class SkipLogits(Pass):
    """The chunk ends at the last decoder layer, or at the final norm if that is tapped: what it leaves is KV, and
    ``committed`` state stays as it is.

    The lm_head's weights, a fifth of a small model's, are not read.
    """

    name: ClassVar[str] = "skip_logits"
    looks_for: ClassVar[str] = "an lm_head after the last decoder layer"
    region: ClassVar[PassRegion] = "commit"
    requires: ClassVar[Facts] = facts("target_inputs", "logits")
    provides: ClassVar[Facts] = facts("committed")
    invalidates: ClassVar[Facts] = facts("logits")

    def run(self, graph: StepGraph) -> Changes:
        before = len(graph.graph.nodes)
        last = graph.anchors.layers[-1]
        graph.anchors = replace(graph.anchors, final_norm=last, lm_head=last)
        graph.set_outputs()
        graph.remove_dead_code(keep=[*marked(graph), last])
        return Changes(1, f"{before - len(graph.graph.nodes)} ops after the last layer are gone")

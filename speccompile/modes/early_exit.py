"""Early exit: the target's own first layers, final norm and lm_head draft.

Source: Elhoushi et al., "LayerSkip" (2024). A pass copies the drafter from the captured graph. The drafter shares
weights and KV of its layers with the target, and needs no other state. The target's forward of every tier, including
K=0, writes the KV that the next draft reads.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from torch import fx

from speccompile.graph.step_form import StepForm
from speccompile.graph.step_graph import StepGraph
from speccompile.graph_capture.model_info import ModelInfo
from speccompile.modes.base import Mode
from speccompile.passes.base import Pass
from speccompile.passes.step.draft_chain import DraftChain, Forward


@dataclass(frozen=True)
class EarlyExit(Mode):
    """Drafts with the target's first ``exit_layer`` decoder layers.

    Args:
        exit_layer: the number of layers, between 1 and L. L drafts with the whole target.
    """

    exit_layer: int = 1

    name: ClassVar[str] = "early_exit"
    draft_probs: ClassVar[bool] = True
    runs_target_layers: ClassVar[bool] = True

    def check(self, info: ModelInfo) -> None:
        good = isinstance(self.exit_layer, int) and 1 <= self.exit_layer <= info.num_layers
        if not good or isinstance(self.exit_layer, bool):
            reason = f"it must be an int in 1 .. {info.num_layers}, the number of the target's decoder layers"
            raise self.invalid("exit_layer", self.exit_layer, reason)

    def drafting(self, form: StepForm) -> list[Pass]:
        return [DraftEarlyExit(*form.chain, exit_layer=self.exit_layer)]

    def explain(self) -> str:
        return f"the target's first {self.exit_layer} layers draft, sharing their KV"


@dataclass(frozen=True)
class DraftEarlyExit(DraftChain):
    """Draft with forwards of the target's first ``exit_layer`` layers."""

    exit_layer: int = field(kw_only=True)

    name: ClassVar[str] = "draft_early_exit"
    looks_for: ClassVar[str] = "decoder layers to copy"

    def forward(self, graph: StepGraph) -> Forward:
        anchors, slots, start = graph.anchors, graph.values["slots"], graph.anchors.start
        # In a mixed step the target also has rows of a prompt, which do not draft.
        target_slots = graph.values.get("target_slots", slots)

        def forward(token: fx.Node, position: fx.Node, place: int) -> fx.Node:
            inputs = {anchors.tokens: token, anchors.positions: position, target_slots: slots}
            hidden = graph.splice(anchors.layers[self.exit_layer - 1], inputs, before=start)
            return graph.splice(graph.values["logits"], {**inputs, anchors.layers[-1]: hidden}, before=start)

        return forward

    def what(self, graph: StepGraph) -> str:
        return f"{self.draft_len} forwards of {self.exit_layer} layers"

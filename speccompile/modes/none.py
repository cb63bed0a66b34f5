"""No speculation: the plain decoder. Every other mode's K=0 tier also runs it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from speccompile.graph.step_form import StepForm
from speccompile.modes.base import Mode
from speccompile.passes.base import Pass
from speccompile.passes.step.drafts import NoDrafts


@dataclass(frozen=True)
class NoSpeculation(Mode):
    """Plain decoding: one token in each step, without drafts."""

    name: ClassVar[str] = "none"
    # It never proposes drafts, so the K=0 tier serves every step.
    ready: ClassVar[bool] = True
    # It has no drafts without probabilities.
    draft_probs: ClassVar[bool] = True

    def drafting(self, form: StepForm) -> list[Pass]:
        return [NoDrafts()]

    def explain(self) -> str:
        return "plain decoding, one token a step"

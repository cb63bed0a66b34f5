"""No speculation: the plain decoder, which is also what every other mode's K=0 tier runs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from speccompile.graph.step_form import StepForm
from speccompile.modes.base import Mode
from speccompile.passes.base import Pass
from speccompile.passes.step.drafts import NoDrafts


@dataclass(frozen=True)
class NoSpeculation(Mode):
    """One token a step."""

    name: ClassVar[str] = "none"
    # It never proposes anything, so the K=0 tier serves every step,
    ready: ClassVar[bool] = True
    # and no draft of it lacks probabilities.
    draft_probs: ClassVar[bool] = True

    def drafting(self, form: StepForm) -> list[Pass]:
        return [NoDrafts()]

    def explain(self) -> str:
        return "plain decoding, one token a step"

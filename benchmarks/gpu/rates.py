"""Acceptance at a rate that can be changed while requests run: what an adaptive policy has to follow."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from speccompile.acceptance import Rule
from speccompile.acceptance.lossy import keep_passes
from speccompile.graph.state import StateSpec
from speccompile.graph.step_form import StepForm
from speccompile.ops.noise import FORCED, coins
from speccompile.passes.base import Pass

RATE = "forced_rate"


@dataclass(frozen=True)
class AtRate(Rule):
    """Each draft after an accepted one is accepted with the probability that stands in the state ``forced_rate``. The
    text is garbage, as with ``Forced``; missing drafts are filled."""

    name: ClassVar[str] = "forced_at_rate"
    lossless: ClassVar[bool] = False
    text_invariant: ClassVar[bool] = False
    fills_drafts: ClassVar[bool] = True

    def state(self) -> list[StateSpec]:
        return [StateSpec(RATE, (1,), torch.float32, fill=1.0)]

    def passes(self, form: StepForm) -> list[Pass]:
        return keep_passes(at_rate, form, (RATE,))

    def explain(self) -> str:
        return "FOR BENCHMARKS, the text is garbage: drafts are accepted at a rate that the benchmark sets"


def at_rate(
    scores: torch.Tensor,
    drafts: torch.Tensor,
    text: torch.Tensor,
    length: torch.Tensor,
    slots: torch.Tensor,
    rate: torch.Tensor,
) -> torch.Tensor:
    """Which drafts pass, ``[B, K]``."""
    places = length[:, None] + torch.arange(drafts.shape[1], device=drafts.device)
    return coins(slots, FORCED, places, length) < rate

"""Min-p: tokens stay whose probability is at least a share of the greatest one's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch

from speccompile.graph.state import N, StateSpec
from speccompile.sampling.base import Option, number
from speccompile.sampling.threshold import Scans, ThresholdProcessor

#: Scores may be so much below the threshold: two units in the last place of a float32 between 16 and 32, as logits are.
#: Without it a token whose probability equals the share goes at every eighth such border, since scores are rounded.
ROUNDING = 2.0**-18


class MinP(ThresholdProcessor):
    """transformers' ``MinPLogitsWarper``, but that a probability that equals the share up to :data:`ROUNDING` stays."""

    name = "min_p"
    options: ClassVar = (Option("min_p", number(0, 1), neutral=0.0, draws=True),)
    state: ClassVar = (StateSpec("min_p", (N,), torch.float32),)

    def place(self, values: Mapping[str, Any], prompt_length: int) -> dict[str, Any]:
        return {"min_p": float(values["min_p"])}

    def threshold(self, scores: torch.Tensor, scans: Scans, *state: torch.Tensor) -> torch.Tensor:
        return scans.greatest(scores, 1) + state[0].log()[:, None, None] - ROUNDING

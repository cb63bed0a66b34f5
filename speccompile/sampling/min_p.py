"""Min-p: tokens stay whose probability is at least a share of the greatest one's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch

from speccompile.graph.state import N, StateSpec
from speccompile.sampling.base import Option, number
from speccompile.sampling.threshold import ThresholdProcessor


class MinP(ThresholdProcessor):
    """transformers' ``MinPLogitsWarper``, but that a probability that equals the share up to
    :data:`~speccompile.ops.tolerances.MIN_P_ROUNDING` stays."""

    name = "min_p"
    options: ClassVar = (Option("min_p", number(0, 1), neutral=0.0, draws=True),)
    state: ClassVar = (StateSpec("min_p", (N,), torch.float32),)

    def place(self, values: Mapping[str, Any], prompt_length: int) -> dict[str, Any]:
        return {"min_p": float(values["min_p"])}

    def threshold(self, scores: torch.Tensor, *state: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = torch.ops.speccompile.min_p_threshold(scores, *state)
        return found

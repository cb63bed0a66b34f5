"""Top-p (nucleus): the fewest of the most likely tokens whose probabilities sum to at least p stay."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch

from speccompile.graph.state import N, StateSpec
from speccompile.sampling.base import Option, number
from speccompile.sampling.threshold import ThresholdProcessor


class TopP(ThresholdProcessor):
    """transformers' ``TopPLogitsWarper``, with two differences: a sum that equals p up to
    :data:`~speccompile.ops.tolerances.ROUNDING` reaches it, and tokens whose score equals the last one that stays also
    stay."""

    name = "top_p"
    options: ClassVar = (Option("top_p", number(0, 1), neutral=1.0, draws=True),)
    state: ClassVar = (StateSpec("top_p", (N,), torch.float32, fill=1),)

    def place(self, values: Mapping[str, Any], prompt_length: int) -> dict[str, Any]:
        return {"top_p": float(values["top_p"])}

    def threshold(self, scores: torch.Tensor, *state: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = torch.ops.speccompile.top_p_threshold(scores, *state)
        return found

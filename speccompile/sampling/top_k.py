"""Top-k: only the k greatest scores stay."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch

from speccompile.graph.state import N, StateSpec
from speccompile.sampling.base import Option, whole
from speccompile.sampling.threshold import ThresholdProcessor
from speccompile.utils.devices import traits_of


class TopK(ThresholdProcessor):
    """transformers' ``TopKLogitsWarper``: what equals the k-th greatest stays too."""

    name = "top_k"
    options: ClassVar = (Option("top_k", whole(0), neutral=0, default=50, draws=True),)
    state: ClassVar = (StateSpec("top_k", (N,), torch.int64, high=2),)

    def place(self, values: Mapping[str, Any], prompt_length: int) -> dict[str, Any]:
        return {"top_k": values["top_k"]}

    def threshold(self, scores: torch.Tensor, *state: torch.Tensor) -> torch.Tensor:
        count = state[0].clamp(max=scores.shape[-1])
        # Only host memory may be asked for a number in the middle of a step.
        most = max(1, int(count.max())) if traits_of(scores.device).host_memory else scores.shape[-1]
        values = torch.ops.speccompile.greatest(scores, most)
        index = (count - 1).clamp(min=0)[:, None, None].expand(*scores.shape[:2], 1)
        return torch.where(count[:, None, None] > 0, values.gather(-1, index), float("-inf"))

"""Typical-p: the fewest tokens whose information is nearest to the entropy and whose probabilities sum to p stay."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
import torch.nn.functional as F

from speccompile.graph.state import N, StateSpec
from speccompile.ops.tolerances import TYPICAL_P_ROUNDING
from speccompile.sampling.base import Option, Processor, number


class TypicalP(Processor):
    """transformers' ``TypicalLogitsWarper`` (Meister et al., "Locally Typical Sampling", 2022), but that a sum that
    equals p up to :data:`TYPICAL_P_ROUNDING` reaches it."""

    name = "typical_p"
    options: ClassVar = (Option("typical_p", number(0, 1, above=True), neutral=1.0, draws=True),)
    state: ClassVar = (StateSpec("typical_p", (N,), torch.float32, fill=1),)

    def place(self, values: Mapping[str, Any], prompt_length: int) -> dict[str, Any]:
        return {"typical_p": float(values["typical_p"])}

    def apply(self, scores: torch.Tensor, context: torch.Tensor, length: torch.Tensor, *state: torch.Tensor) -> None:
        mass = state[0][:, None, None]
        information = -scores.log_softmax(-1)
        probability = (-information).exp()
        entropy = row_sums(torch.where(probability > 0, information * probability, 0.0))
        distance = (information - entropy).abs()
        ordered, order = distance.sort(-1)
        before = probability.gather(-1, order).cumsum(-1)
        last = (before < mass - TYPICAL_P_ROUNDING).sum(-1, keepdim=True).clamp(max=scores.shape[-1] - 1)
        threshold = torch.where(mass < 1, ordered.gather(-1, last), float("inf"))
        scores.masked_fill_(distance > threshold, float("-inf"))


def row_sums(values: torch.Tensor) -> torch.Tensor:
    """Sums ``[B, T, 1]`` of ``[B, T, V]``, in an order that does not depend on the number of positions.

    Torch divides one long sum among threads, but not each of many short sums. Two steps of short sums avoid this.
    """
    return F.pad(values, (0, -values.shape[-1] % 256)).unflatten(-1, (-1, 256)).sum(-1).sum(-1, keepdim=True)

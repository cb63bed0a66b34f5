"""Top-p (nucleus): the fewest of the most likely tokens whose probabilities sum to at least p stay."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
import torch.nn.functional as F

from speccompile.graph.state import N, StateSpec
from speccompile.ops.tolerances import ROUNDING
from speccompile.sampling.base import Option, number
from speccompile.sampling.threshold import ThresholdProcessor
from speccompile.utils.devices import traits_of

# The nucleus is searched among so many of the greatest scores, then among more. 256 of 50,000 are found six times as
# fast as 1,024, and a hundred times as fast as all are sorted.
SEARCH_SIZES = (256, 4096)


class TopP(ThresholdProcessor):
    """transformers' ``TopPLogitsWarper``, with two differences: a sum that equals p up to :data:`ROUNDING` reaches it,
    and tokens whose score equals the last one that stays also stay."""

    name = "top_p"
    options: ClassVar = (Option("top_p", number(0, 1), neutral=1.0, draws=True),)
    state: ClassVar = (StateSpec("top_p", (N,), torch.float32, fill=1),)

    def place(self, values: Mapping[str, Any], prompt_length: int) -> dict[str, Any]:
        return {"top_p": float(values["top_p"])}

    def threshold(self, scores: torch.Tensor, *state: torch.Tensor) -> torch.Tensor:
        top_p = state[0][:, None, None]
        greatest = torch.ops.speccompile.greatest_share(scores)
        vocab = scores.shape[-1]
        # Whether the search may end early is read from the tensor, which only host memory allows within a step.
        for size in (*SEARCH_SIZES, vocab) if traits_of(scores.device).host_memory else (vocab,):
            values = torch.ops.speccompile.greatest(scores, min(size, vocab))
            mass = (values - values[..., :1]).exp() * greatest
            # A token stays if the tokens before it do not reach p.
            before = F.pad(mass.cumsum(-1)[..., :-1], (1, 0))
            inside = before < top_p - ROUNDING
            inside[..., 0] = True
            count = inside.sum(-1, keepdim=True)
            if size == vocab or not ((count == size) & (top_p < 1)).any():
                break
        return torch.where(top_p < 1, values.gather(-1, count - 1), float("-inf"))

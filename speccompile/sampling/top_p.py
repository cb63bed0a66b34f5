"""Top-p (nucleus): the fewest of the most likely tokens whose probabilities sum to at least p stay."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
import torch.nn.functional as F

from speccompile.graph.state import N, StateSpec
from speccompile.ops.tolerances import ROUNDING
from speccompile.sampling.base import Option, number
from speccompile.sampling.keep_greatest import KeepGreatest, Scans
from speccompile.utils.devices import traits_of

# The nucleus is looked for among so many tokens, one look after the other: 256 of 50,000 are found six times as fast as
# 1,024, and a hundred times as fast as all are sorted.
LOOKS = (256, 4096)


class TopP(KeepGreatest):
    """transformers' ``TopPLogitsWarper``, with two differences: a sum that equals p up to :data:`ROUNDING` reaches it,
    and tokens whose score equals the last one that stays also stay."""

    name = "top_p"
    options: ClassVar = (Option("top_p", number(0, 1, above=True), neutral=1.0, draws=True),)
    state: ClassVar = (StateSpec("top_p", (N,), torch.float32, fill=1),)

    def place(self, values: Mapping[str, Any], prompt_length: int) -> dict[str, Any]:
        return {"top_p": float(values["top_p"])}

    def threshold(self, scores: torch.Tensor, scans: Scans, *state: torch.Tensor) -> torch.Tensor:
        top_p = state[0][:, None, None]
        most = scans.share(scores)
        vocab = scores.shape[-1]
        # Only host memory may be asked in the middle of a step whether it has seen enough.
        for look in (*LOOKS, vocab) if traits_of(scores.device).host_memory else (vocab,):
            values = scans.greatest(scores, min(look, vocab))
            mass = (values - values[..., :1]).exp() * most
            # A token stays if the tokens before it do not reach p.
            before = F.pad(mass.cumsum(-1)[..., :-1], (1, 0))
            inside = before < top_p - ROUNDING
            inside[..., 0] = True
            count = inside.sum(-1, keepdim=True)
            if look == vocab or not ((count == look) & (top_p < 1)).any():
                break
        return torch.where(top_p < 1, values.gather(-1, count - 1), float("-inf"))

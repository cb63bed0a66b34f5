"""Top-p (nucleus): the most likely tokens stay, as few as make up the mass p."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch

from speccompile.graph_capture.state import N, StateSpec
from speccompile.sampling.base import Option, number
from speccompile.sampling.keep_greatest import KeepGreatest, Scans

# The nucleus is looked for among so many tokens, one look after the other: 256 of 50,000 are found six times as fast as
# 1,024, and a hundred times as fast as all are sorted.
LOOKS = (256, 4096)


class TopP(KeepGreatest):
    """transformers' ``TopPLogitsWarper``, save that of equal scores at the border all stay."""

    name = "top_p"
    options: ClassVar = (Option("top_p", number(0, 1, above=True), neutral=1.0, draws=True),)
    state: ClassVar = (StateSpec("top_p", (N,), torch.float32, fill=1),)

    def place(self, values: Mapping[str, Any], prompt_length: int) -> dict[str, Any]:
        return {"top_p": float(values["top_p"])}

    def threshold(self, scores: torch.Tensor, scans: Scans, *state: torch.Tensor) -> torch.Tensor:
        top_p = state[0][:, None, None]
        most = scans.share(scores)
        vocab = scores.shape[-1]
        # Only a CPU may be asked in the middle of a step whether it has seen enough.
        for look in (*LOOKS, vocab) if scores.device.type == "cpu" else (vocab,):
            values = scans.greatest(scores, min(look, vocab))
            mass = (values - values[..., :1]).exp() * most
            # A token stays while those in front of it make up less than p.
            inside = mass.cumsum(-1) - mass < top_p
            inside[..., 0] = True
            count = inside.sum(-1, keepdim=True)
            if look == vocab or not ((count == look) & (top_p < 1)).any():
                break
        return torch.where(top_p < 1, values.gather(-1, count - 1), float("-inf"))

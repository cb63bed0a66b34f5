"""``relaxed``: while the model thinks, a draft stays if it is nearly the most likely token. Lossy.

TensorRT-LLM's relaxed acceptance for reasoning models (MTP): ``use_relaxed_acceptance_for_thinking``.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import torch

from speccompile.acceptance.base import Rule
from speccompile.acceptance.keep import keep_passes, number_problem
from speccompile.errors import InvalidOption
from speccompile.lowering.tier import Kind
from speccompile.passes.base import Pass


@dataclass(frozen=True)
class Relaxed(Rule):
    """In the thinking phase accept x if it is among the ``top_k`` most likely tokens and its probability is at most
    ``delta`` below the greatest; outside of it, and for the token behind the drafts, greedily.

    A text is in the thinking phase behind its last ``begin`` token, until an ``end`` token comes; what a step commits
    counts from the next step on. Text depends on the drafts. For greedy requests alone.

    Args:
        begin, end: token ids, such as those of ``<think>`` and ``</think>``.
        top_k: at least 1; 1 is greedy.
        delta: of probability, at least 0; 0 is greedy up to ties.
    """

    begin: int
    end: int
    top_k: int = 10
    delta: float = 0.6

    name: ClassVar[str] = "relaxed"
    lossless: ClassVar[bool] = False
    text_invariant: ClassVar[bool] = False
    greedy_only: ClassVar[bool] = True

    def __post_init__(self) -> None:
        def refuse(name: str, reason: str) -> None:
            raise InvalidOption(where="acceptance 'relaxed'", name=name, value=getattr(self, name), reason=reason)

        for name, least in (("begin", 0), ("end", 0), ("top_k", 1)):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                refuse(name, f"it has to be an int of at least {least}")
        if self.begin == self.end:
            refuse("end", "it is the begin token too")
        if problem := number_problem(self.delta, float("inf")):
            refuse("delta", problem)

    def passes(self, kind: Kind) -> list[Pass]:
        judge = partial(near_enough, begin=self.begin, end=self.end, top_k=self.top_k, delta=self.delta)
        return keep_passes(judge, kind)

    def explain(self) -> str:
        return (
            f"lossy: between the tokens {self.begin} and {self.end} a draft token stays if it is among the "
            f"{self.top_k} most likely and at most {self.delta:g} below the first"
        )


def thinking(text: torch.Tensor, length: torch.Tensor, *, begin: int, end: int) -> torch.Tensor:
    """Whether a row's text ``[B, S]`` of ``length`` ``[B]`` is in the thinking phase, ``[B]``: the last token of both
    decides."""
    places = torch.arange(text.shape[1], device=text.device)
    inside = places < length[:, None]
    last_begin, last_end = (torch.where(inside & (text == token), places, -1).amax(1) for token in (begin, end))
    return last_begin > last_end


def near_enough(
    scores: torch.Tensor,
    drafts: torch.Tensor,
    text: torch.Tensor,
    length: torch.Tensor,
    *,
    begin: int,
    end: int,
    top_k: int,
    delta: float,
) -> torch.Tensor:
    """Which drafts pass, ``[B, K]``."""
    probs = scores[:, : drafts.shape[1]].float().softmax(-1)
    greatest = probs.topk(min(top_k, probs.shape[-1]), dim=-1)
    near = greatest.values >= greatest.values[..., :1] - delta
    relaxed = ((greatest.indices == drafts[..., None]) & near).any(-1)
    strict = drafts == scores[:, : drafts.shape[1]].argmax(-1)
    return strict | (relaxed & thinking(text, length, begin=begin, end=end)[:, None])

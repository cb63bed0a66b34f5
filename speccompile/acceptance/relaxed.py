"""``relaxed``: while the model thinks, a draft stays if it is almost as likely as the first token. Lossy.

TensorRT-LLM's relaxed acceptance for reasoning models (MTP): ``use_relaxed_acceptance_for_thinking``.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch

import speccompile.ops  # noqa: F401  defines the ops
from speccompile.acceptance.base import Rule
from speccompile.acceptance.lossy import keep_passes, number_problem
from speccompile.errors import InvalidOption
from speccompile.graph.keys import Kind
from speccompile.graph_capture.model_info import ModelInfo
from speccompile.passes.base import Pass

is_within_top = torch.ops.speccompile.is_within_top


@dataclass(frozen=True)
class Relaxed(Rule):
    """In the thinking phase accept x if it is among the ``top_k`` most likely tokens and its probability is at most
    ``delta`` below the greatest. Outside of it, and for the token after the drafts, it is greedy.

    A sequence is in the thinking phase from its last ``begin`` token to the next ``end`` token. A token that a step
    commits is effective from the next step on. Text depends on the drafts. For greedy requests alone.

    ``trtllm_compat`` does as TensorRT-LLM does (``_torch/speculative/mtp.py``, ``sample_and_accept_draft_tokens``, and
    its kernel ``mtpRelaxedAcceptanceKernel``) where that is something else:

    - ``end`` tokens of the prompt do not count: one that has a ``begin`` anywhere starts in the thinking phase, which
      only an ``end`` of the model's own ends. (mtp.py: ``ctx_think_tokens_num >= 1``.)
    - Outside of the phase ``delta`` is 0 and no comparison of tokens takes its place: a draft that is exactly as likely
      as the target's own choice stays, if it is among the ``top_k``. (Kernel: ``threshold > topKValue`` breaks.)

    Not copied: TensorRT-LLM sees the chunk of a prompt that it read last, without what its KV cache knew. Here a prompt
    counts whole, as it does there with neither chunked context nor KV reuse.

    Args:
        begin, end: token ids, such as those of ``<think>`` and ``</think>``.
        top_k: at least 1; 1 is greedy.
        delta: of probability, at least 0; 0 is greedy up to ties.
        trtllm_compat: see above.
    """

    begin: int
    end: int
    top_k: int = 10
    delta: float = 0.6
    trtllm_compat: bool = False

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
        if not isinstance(self.trtllm_compat, bool):
            refuse("trtllm_compat", "use True or False")

    def check(self, info: ModelInfo) -> None:
        for name in ("begin", "end"):
            if getattr(self, name) >= info.vocab_size:
                reason = f"it is not a token id of the target (0 .. {info.vocab_size - 1}), so it never comes"
                raise InvalidOption(where="acceptance 'relaxed'", name=name, value=getattr(self, name), reason=reason)

    def passes(self, kind: Kind) -> list[Pass]:
        options: dict[str, Any] = {"begin": self.begin, "end": self.end, "top_k": self.top_k, "delta": self.delta}
        if self.trtllm_compat:
            return keep_passes(partial(within_top_in_trtllm, **options), kind, ("prompt_length",))
        return keep_passes(partial(within_top, **options), kind)

    def explain(self) -> str:
        return (
            f"lossy: between the tokens {self.begin} and {self.end} a draft token stays if it is among the "
            f"{self.top_k} most likely and at most {self.delta:g} below the first"
            f"{', as in TensorRT-LLM' * self.trtllm_compat}"
        )


def thinking(
    text: torch.Tensor, length: torch.Tensor, *, begin: int, end: int, end_from: torch.Tensor | None = None
) -> torch.Tensor:
    """Whether a row's text ``[B, S]`` of ``length`` ``[B]`` is in the thinking phase, ``[B]``: the last token of both
    decides, where ``end`` counts from ``end_from`` ``[B]`` on."""
    places = torch.arange(text.shape[1], device=text.device)
    inside = places < length[:, None]
    ends = inside & (text == end)
    if end_from is not None:
        ends = ends & (places >= end_from[:, None])
    last_begin, last_end = (torch.where(marks, places, -1).amax(1) for marks in (inside & (text == begin), ends))
    return last_begin > last_end


def within_top(
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
    thinks = thinking(text, length, begin=begin, end=end)
    # Below 0 no draft is within the top.
    allowed = torch.full_like(length, -1.0, dtype=torch.float32).masked_fill(thinks, delta)
    return first(scores, drafts) | is_within_top(scores, drafts, allowed, top_k)


def within_top_in_trtllm(
    scores: torch.Tensor,
    drafts: torch.Tensor,
    text: torch.Tensor,
    length: torch.Tensor,
    slots: torch.Tensor,
    prompt_length: torch.Tensor,
    *,
    begin: int,
    end: int,
    top_k: int,
    delta: float,
) -> torch.Tensor:
    """Which drafts pass, ``[B, K]``."""
    thinks = thinking(text, length, begin=begin, end=end, end_from=prompt_length[slots])
    allowed = torch.zeros_like(length, dtype=torch.float32).masked_fill(thinks, delta)
    return first(scores, drafts) | is_within_top(scores, drafts, allowed, top_k)


def first(scores: torch.Tensor, drafts: torch.Tensor) -> torch.Tensor:
    """Which drafts are the target's own choice, ``[B, K]``; none where all tokens are forbidden."""
    greatest = scores[:, : drafts.shape[1]].max(-1)
    return (drafts == greatest.indices) & (greatest.values != float("-inf"))

"""``relaxed``: in the thinking phase, a draft is accepted if it is almost as likely as the likeliest token. Lossy.

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
from speccompile.graph.step_form import StepForm
from speccompile.graph_capture.model_info import ModelInfo
from speccompile.passes.base import Pass
from speccompile.utils.numbers import is_int

is_within_top = torch.ops.speccompile.is_within_top


@dataclass(frozen=True)
class Relaxed(Rule):
    """In the thinking phase, accept a draft if it is among the ``top_k`` most likely tokens and its probability is at
    most ``delta`` below the greatest one.

    Outside of the phase, and for the token after the drafts, the rule is greedy. A sequence is in the thinking phase
    from its last ``begin`` token to the next ``end`` token. A token that a step commits is effective from the next step
    on. The emitted tokens depend on the drafts. The rule is only for greedy requests.

    ``trtllm_compat`` follows TensorRT-LLM (``_torch/speculative/mtp.py``, ``sample_and_accept_draft_tokens``, and its
    kernel ``mtpRelaxedAcceptanceKernel``) in two details:

    - ``end`` tokens of the prompt are ignored. A prompt with a ``begin`` token anywhere starts in the thinking phase,
      and only an ``end`` token that the model emits ends the phase. (mtp.py: ``ctx_think_tokens_num >= 1``.)
    - Outside of the phase ``delta`` is 0, and tokens are not compared. A draft that is exactly as likely as the
      target's own choice is accepted if it is among the ``top_k``. (Kernel: ``threshold > topKValue`` breaks.)

    One detail differs: TensorRT-LLM searches only the last chunk of a prompt, without the tokens whose KV it reuses.
    Here the whole prompt is searched, as in TensorRT-LLM without chunked context and KV reuse.

    Args:
        begin, end: token ids, such as those of ``<think>`` and ``</think>``.
        top_k: number of tokens, at least 1; 1 is greedy.
        delta: difference of probabilities, at least 0; 0 is greedy up to ties.
        trtllm_compat: follow TensorRT-LLM in the details above.
    """

    begin: int
    end: int
    top_k: int = 10
    delta: float = 0.6
    trtllm_compat: bool = False

    name: ClassVar[str] = "relaxed"
    lossless: ClassVar[bool] = False
    text_invariant: ClassVar[bool] = False
    judges_trees: ClassVar[bool] = True
    greedy_only: ClassVar[bool] = True

    def __post_init__(self) -> None:
        def refuse(name: str, reason: str) -> None:
            raise InvalidOption(where="acceptance 'relaxed'", name=name, value=getattr(self, name), reason=reason)

        for name, least in (("begin", 0), ("end", 0), ("top_k", 1)):
            value = getattr(self, name)
            if not is_int(value) or value < least:
                refuse(name, f"it must be an int of at least {least}")
        if self.begin == self.end:
            refuse("end", "it must differ from the begin token")
        if problem := number_problem(self.delta, float("inf")):
            refuse("delta", problem)
        if not isinstance(self.trtllm_compat, bool):
            refuse("trtllm_compat", "use True or False")

    def check(self, info: ModelInfo) -> None:
        for name in ("begin", "end"):
            if getattr(self, name) >= info.vocab_size:
                reason = f"it is not a token id of the target (0 .. {info.vocab_size - 1}), so it never comes"
                raise InvalidOption(where="acceptance 'relaxed'", name=name, value=getattr(self, name), reason=reason)

    def passes(self, form: StepForm) -> list[Pass]:
        options: dict[str, Any] = {"begin": self.begin, "end": self.end, "top_k": self.top_k, "delta": self.delta}
        if self.trtllm_compat:
            return keep_passes(partial(within_top_in_trtllm, **options), form, ("prompt_length",))
        return keep_passes(partial(within_top, **options), form)

    def explain(self) -> str:
        return (
            f"between the tokens {self.begin} and {self.end} a draft token stays if it is among the "
            f"{self.top_k} most likely and at most {self.delta:g} below the first"
            f"{', as in TensorRT-LLM' * self.trtllm_compat}"
        )


def thinking(
    text: torch.Tensor, length: torch.Tensor, *, begin: int, end: int, end_from: torch.Tensor | None = None
) -> torch.Tensor:
    """Whether each row's sequence is in the thinking phase, bool ``[B]``: its last ``begin`` comes after its last
    ``end``.

    Args:
        text: the rows' tokens ``[B, S]``; length: ``[B]``.
        end_from: ``[B]``, the first position whose ``end`` tokens are read; None is 0.
    """
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
    """Whether each draft is accepted, bool ``[B, K]``."""
    thinks = thinking(text, length, begin=begin, end=end)
    # A negative delta accepts no draft.
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
    """:func:`within_top` in the details of TensorRT-LLM: see :class:`Relaxed`."""
    thinks = thinking(text, length, begin=begin, end=end, end_from=prompt_length[slots])
    allowed = torch.zeros_like(length, dtype=torch.float32).masked_fill(thinks, delta)
    return first(scores, drafts) | is_within_top(scores, drafts, allowed, top_k)


def first(scores: torch.Tensor, drafts: torch.Tensor) -> torch.Tensor:
    """Whether each draft is the target's own choice, bool ``[B, K]``; False where all tokens are forbidden."""
    greatest = scores[:, : drafts.shape[1]].max(-1)
    return (drafts == greatest.indices) & (greatest.values != float("-inf"))

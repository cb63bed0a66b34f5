"""The result of a request for its caller."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from speccompile.runtime.stats import RequestStats


@dataclass(frozen=True)
class Timings:
    """Seconds since a request was submitted; None for events that did not happen before its end.

    Args:
        queued: until the request had a slot.
        first_token: until its first token.
        total: until it ended.
    """

    queued: float | None
    first_token: float | None
    total: float


@dataclass(frozen=True)
class Result:
    """The result of a request.

    Args:
        token_ids: the new tokens, an EOS id included.
        text: their text as it continues the prompt's, without special tokens; None without a tokenizer.
        finish_reason: ``eos``, ``stop``, ``max_new_tokens``, ``max_len`` or ``cancelled``.
        stats: prompt, reused and draft tokens, acceptance.
        logprobs: natural log-probability of each new token by the model's own logits, before any processor (vLLM's
            "raw"). Like all further fields it is only set if requested.
        prompt_logprobs: natural log-probability of each prompt token, given those before it; None for the first one. If
            the request was cancelled, only for tokens that had been processed.
        logits: float32 ``[new, V]``, the model's own.
        scores: float32 ``[new, V]``: logits after all processors, from which the tokens were chosen.
        top_logprobs: at each new token the likeliest tokens with their log-probabilities, the likeliest first.
        prompt_best: at each prompt token the likeliest token at that position with its log-probability; None for the
            first one. Given with ``prompt_logprobs``.
        prompt_top_logprobs: at each prompt token the likeliest tokens, as many as ``top_logprobs``, but at least 1 and
            at most 20; None for the first one. Given with ``prompt_logprobs``.
    """

    token_ids: list[int]
    text: str | None
    finish_reason: str
    timings: Timings
    stats: RequestStats
    logprobs: list[float] | None = None
    prompt_logprobs: list[float | None] | None = None
    logits: torch.Tensor | None = field(default=None, repr=False)
    scores: torch.Tensor | None = field(default=None, repr=False)
    top_logprobs: list[list[tuple[int, float]]] | None = None
    prompt_best: list[tuple[int, float] | None] | None = None
    prompt_top_logprobs: list[list[tuple[int, float]] | None] | None = None

    @property
    def acceptance_length(self) -> float:
        """Mean emitted tokens per target pass; 0.0 if prefill emitted them all."""
        return self.stats.acceptance_length

"""Lists of tokens that get a bias on their scores, or that are never chosen."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch

from speccompile.graph.state import N, StateSpec
from speccompile.sampling.base import (
    Option,
    Processor,
    bias_problem,
    context_lengths,
    forbid,
    token_ids,
    token_problem,
)

BIAS_CAPACITY = 256
SUPPRESS_CAPACITY = 256
BEGIN_CAPACITY = 64


def _bias_problem(value: Any, vocab: int) -> str | None:
    if not isinstance(value, Mapping):
        return "it must map token ids to numbers"
    if len(value) > BIAS_CAPACITY:
        return f"it has {len(value)} ids, and a slot holds at most {BIAS_CAPACITY}"
    for token, bias in value.items():
        if wrong := token_problem(token, vocab):
            return wrong
        if wrong := bias_problem(bias):
            return f"the bias {bias!r} of token {token} {wrong}"
    return None


class LogitBias(Processor):
    """A bias that is added to the scores of single tokens: OpenAI's ``logit_bias``."""

    name = "logit_bias"
    options: ClassVar = (Option("logit_bias", _bias_problem, neutral={}),)
    state: ClassVar = (
        StateSpec("bias_ids", (N, BIAS_CAPACITY), torch.int64, fill=-1, low=-1, high=2),
        StateSpec("bias_values", (N, BIAS_CAPACITY), torch.float32),
    )

    def place(self, values: Mapping[str, Any], prompt_length: int) -> dict[str, Any]:
        bias = values["logit_bias"]
        return {"bias_ids": list(bias), "bias_values": [float(value) for value in bias.values()]}

    def apply(self, scores: torch.Tensor, context: torch.Tensor, length: torch.Tensor, *state: torch.Tensor) -> None:
        ids, values = state
        vocab = scores.shape[-1]
        bias = scores.new_zeros(ids.shape[0], vocab + 1)
        bias.scatter_(1, torch.where(ids < 0, vocab, ids), values)
        scores.add_(bias[:, None, :vocab])


class SuppressTokens(Processor):
    """transformers' ``SuppressTokensLogitsProcessor``: these tokens are never chosen."""

    name = "suppress_tokens"
    options: ClassVar = (Option("suppress_tokens", token_ids(SUPPRESS_CAPACITY), neutral=[], forbids=True),)
    state: ClassVar = (StateSpec("suppress_ids", (N, SUPPRESS_CAPACITY), torch.int64, fill=-1, low=-1, high=2),)

    def place(self, values: Mapping[str, Any], prompt_length: int) -> dict[str, Any]:
        return {"suppress_ids": list(values["suppress_tokens"])}

    def apply(self, scores: torch.Tensor, context: torch.Tensor, length: torch.Tensor, *state: torch.Tensor) -> None:
        forbid(scores, state[0][:, None])


class BeginSuppressTokens(Processor):
    """transformers' ``SuppressTokensAtBeginLogitsProcessor``: these tokens are not chosen first."""

    name = "begin_suppress_tokens"
    options: ClassVar = (Option("begin_suppress_tokens", token_ids(BEGIN_CAPACITY), neutral=[], forbids=True),)
    state: ClassVar = (
        StateSpec("begin_ids", (N, BEGIN_CAPACITY), torch.int64, fill=-1, low=-1, high=2),
        StateSpec("begin_at", (N,), torch.int64, high=2),
    )

    def place(self, values: Mapping[str, Any], prompt_length: int) -> dict[str, Any]:
        return {"begin_ids": list(values["begin_suppress_tokens"]), "begin_at": prompt_length}

    def apply(self, scores: torch.Tensor, context: torch.Tensor, length: torch.Tensor, *state: torch.Tensor) -> None:
        ids, begin = state
        first = context_lengths(scores, length) == begin[:, None]
        forbid(scores, torch.where(first[..., None], ids[:, None], -1))

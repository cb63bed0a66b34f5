"""Lengths at which a sequence may end, and at which it must end."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch

from speccompile.graph.state import EOS_CAPACITY, N, StateSpec
from speccompile.sampling.base import Option, Processor, as_ids, context_lengths, forbid, token_ids, whole


class MinNewTokens(Processor):
    """transformers' ``MinNewTokensLengthLogitsProcessor``, or ``MinLengthLogitsProcessor``, whose length includes the
    prompt: no EOS id is chosen earlier. ``min_new_tokens`` takes precedence, as in transformers."""

    name = "min_new_tokens"
    options: ClassVar = (Option("min_new_tokens", whole(0), neutral=0), Option("min_length", whole(0), neutral=0))
    state: ClassVar = (StateSpec("eos_from", (N,), torch.int64, high=2),)
    reads: ClassVar = ("eos",)

    def place(self, values: Mapping[str, Any], prompt_length: int) -> dict[str, Any]:
        new = values.get("min_new_tokens")
        return {"eos_from": values["min_length"] if new is None else prompt_length + new}

    def apply(self, scores: torch.Tensor, context: torch.Tensor, length: torch.Tensor, *state: torch.Tensor) -> None:
        earliest, eos = state
        early = context_lengths(scores, length) < earliest[:, None]
        forbid(scores, torch.where(early[..., None], eos[:, None], -1))


class ForcedEos(Processor):
    """transformers' ``ForcedEOSTokenLogitsProcessor``: the last token before the length limit is one of these."""

    name = "forced_eos"
    options: ClassVar = (Option("forced_eos_token_id", token_ids(EOS_CAPACITY, alone=True)),)
    state: ClassVar = (StateSpec("forced_eos", (N, EOS_CAPACITY), torch.int64, fill=-1, low=-1, high=2),)
    reads: ClassVar = ("limit",)

    def place(self, values: Mapping[str, Any], prompt_length: int) -> dict[str, Any]:
        return {"forced_eos": list(as_ids(values["forced_eos_token_id"]))}

    def apply(self, scores: torch.Tensor, context: torch.Tensor, length: torch.Tensor, *state: torch.Tensor) -> None:
        forced, limit = state
        last = (context_lengths(scores, length) == (limit - 1)[:, None]) & (forced[:, :1] >= 0)
        vocab = scores.shape[-1]
        only = scores.new_full((forced.shape[0], vocab + 1), float("-inf"))
        only.scatter_(1, torch.where(forced < 0, vocab, forced), 0.0)
        scores.copy_(torch.where(last[..., None], only[:, None, :vocab], scores))

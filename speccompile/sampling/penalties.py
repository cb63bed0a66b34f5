"""Penalties on tokens that have occurred."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch

from speccompile.graph.state import N, StateSpec
from speccompile.sampling.base import GREATEST, SMALLEST, Option, Processor, context_lengths, number


class RepetitionPenalty(Processor):
    """transformers' ``RepetitionPenaltyLogitsProcessor``: of every token in prompt and text, a positive score is
    divided by the penalty and a negative one multiplied."""

    name = "repetition_penalty"
    options: ClassVar = (Option("repetition_penalty", number(SMALLEST, GREATEST), neutral=1.0),)
    state: ClassVar = (StateSpec("repetition_penalty", (N,), torch.float32, fill=1),)

    def place(self, values: Mapping[str, Any], prompt_length: int) -> dict[str, Any]:
        return {"repetition_penalty": float(values["repetition_penalty"])}

    def apply(self, scores: torch.Tensor, context: torch.Tensor, length: torch.Tensor, *state: torch.Tensor) -> None:
        penalty = state[0][:, None, None]
        ids, _ = _occurring(scores, context, length, torch.zeros_like(length))
        found = scores.gather(-1, ids)
        scores.scatter_(-1, ids, torch.where(found < 0, found * penalty, found / penalty))


class PresencePenalty(Processor):
    """Taken once from the score of every token among the new ones, as in OpenAI's API and vLLM."""

    name = "presence_penalty"
    options: ClassVar = (Option("presence_penalty", number(-100, 100), neutral=0.0),)
    state: ClassVar = (
        StateSpec("presence_penalty", (N,), torch.float32),
        StateSpec("presence_from", (N,), torch.int64, high=2),
    )

    def place(self, values: Mapping[str, Any], prompt_length: int) -> dict[str, Any]:
        return {"presence_penalty": float(values["presence_penalty"]), "presence_from": prompt_length}

    def apply(self, scores: torch.Tensor, context: torch.Tensor, length: torch.Tensor, *state: torch.Tensor) -> None:
        penalty, start = state
        ids, counts = _occurring(scores, context, length, start)
        # Without new tokens ``ids`` is something, and nothing is taken from it.
        taken = penalty[:, None, None] * counts.any(-1, keepdim=True)
        scores.scatter_(-1, ids, scores.gather(-1, ids) - taken)


class FrequencyPenalty(Processor):
    """Taken from a token's score for every time it occurs among the new ones, as in OpenAI's API and vLLM."""

    name = "frequency_penalty"
    options: ClassVar = (Option("frequency_penalty", number(-100, 100), neutral=0.0),)
    state: ClassVar = (
        StateSpec("frequency_penalty", (N,), torch.float32),
        StateSpec("frequency_from", (N,), torch.int64, high=2),
    )

    def place(self, values: Mapping[str, Any], prompt_length: int) -> dict[str, Any]:
        return {"frequency_penalty": float(values["frequency_penalty"]), "frequency_from": prompt_length}

    def apply(self, scores: torch.Tensor, context: torch.Tensor, length: torch.Tensor, *state: torch.Tensor) -> None:
        penalty, start = state
        ids, counts = _occurring(scores, context, length, start)
        # Counted first and taken once: a sum of many small steps would depend on their order.
        times = torch.zeros_like(scores).scatter_add_(-1, ids, counts.to(scores.dtype))
        scores.sub_(times * penalty[:, None, None])


def _occurring(
    scores: torch.Tensor, context: torch.Tensor, length: torch.Tensor, start: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids ``[B, T, S]`` before each place from ``start`` ``[B]`` on, and which of them count. Those that do not
    are the id at ``start``, so that writing there twice the same does no harm."""
    places = torch.arange(context.shape[1], device=context.device)
    counts = (places >= start[:, None, None]) & (places < context_lengths(scores, length)[..., None])
    first = context.gather(1, start[:, None].clamp(max=context.shape[1] - 1))[:, None]
    return torch.where(counts, context[:, None], first).clamp(min=0), counts

"""Penalties on tokens that occur in the sequence."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch

from speccompile.graph.state import N, StateSpec
from speccompile.sampling.base import GREATEST, SMALLEST, Option, Processor, context_lengths, number


class RepetitionPenalty(Processor):
    """transformers' ``RepetitionPenaltyLogitsProcessor``: for every token in prompt and output, a positive score is
    divided by the penalty, and a negative one is multiplied."""

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
    """A penalty that is subtracted once from the score of every new token, as in OpenAI's API and vLLM."""

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
        # Without new tokens ``ids`` has arbitrary ids, and 0 is subtracted.
        taken = penalty[:, None, None] * counts.any(-1, keepdim=True)
        scores.scatter_(-1, ids, scores.gather(-1, ids) - taken)


class FrequencyPenalty(Processor):
    """A penalty that is subtracted for each occurrence of a token among the new ones, as in OpenAI's API and vLLM."""

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
        # Counted first and subtracted once: a sum of many small steps depends on their order.
        times = torch.zeros_like(scores).scatter_add_(-1, ids, counts.to(scores.dtype))
        scores.sub_(times * penalty[:, None, None])


def _occurring(
    scores: torch.Tensor, context: torch.Tensor, length: torch.Tensor, start: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids ``[B, T, S]`` from ``start`` ``[B]`` to each position, and a mask of those that occur there.

    All other ids are replaced by the id at ``start``, which is written twice with the same value.
    """
    places = torch.arange(context.shape[1], device=context.device)
    counts = (places >= start[:, None, None]) & (places < context_lengths(scores, length)[..., None])
    first = context.gather(1, start[:, None].clamp(max=context.shape[1] - 1))[:, None]
    return torch.where(counts, context[:, None], first).clamp(min=0), counts

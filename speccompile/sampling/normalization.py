"""Processors that replace NaN and infinities in scores, and that turn scores into logarithms of probabilities."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch

from speccompile.graph.state import N, StateSpec
from speccompile.sampling.base import Option, Processor


def _flag_problem(value: Any, vocab: int) -> str | None:
    return None if isinstance(value, bool) else "use True or False"


class RemoveInvalidValues(Processor):
    """transformers' ``InfNanRemoveLogitsProcessor``: NaN becomes 0, and an infinite score the greatest or least
    finite one."""

    name = "remove_invalid_values"
    options: ClassVar = (Option("remove_invalid_values", _flag_problem, neutral=False),)
    state: ClassVar = (StateSpec("remove_invalid_values", (N,), torch.bool),)

    def place(self, values: Mapping[str, Any], prompt_length: int) -> dict[str, Any]:
        return dict(values)

    def apply(self, scores: torch.Tensor, context: torch.Tensor, length: torch.Tensor, *state: torch.Tensor) -> None:
        scores.copy_(torch.where(state[0][:, None, None], scores.nan_to_num(), scores))


class RenormalizeLogits(Processor):
    """transformers' ``LogitNormalization``: scores become logarithms of probabilities."""

    name = "renormalize_logits"
    options: ClassVar = (Option("renormalize_logits", _flag_problem, neutral=False),)
    state: ClassVar = (StateSpec("renormalize_logits", (N,), torch.bool),)

    def place(self, values: Mapping[str, Any], prompt_length: int) -> dict[str, Any]:
        return dict(values)

    def apply(self, scores: torch.Tensor, context: torch.Tensor, length: torch.Tensor, *state: torch.Tensor) -> None:
        scores.copy_(torch.where(state[0][:, None, None], scores.log_softmax(-1), scores))

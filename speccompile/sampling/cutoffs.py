"""Epsilon and eta cutoff: tokens whose probability is below a limit are removed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch

from speccompile.graph.state import N, StateSpec
from speccompile.sampling.base import Option, Processor
from speccompile.sampling.typical_p import row_sums
from speccompile.utils.numbers import is_real


def _problem(value: Any, vocab: int) -> str | None:
    if is_real(value) and 0 <= value < 1:
        return None
    return "it must be a number of at least 0 and below 1"


class Cutoffs(Processor):
    """transformers' ``EpsilonLogitsWarper``, then its ``EtaLogitsWarper`` (Hewitt et al., "Truncation Sampling as
    Language Model Desmoothing", 2022). The likeliest token always stays."""

    name = "cutoffs"
    options: ClassVar = (
        Option("epsilon_cutoff", _problem, neutral=0.0, draws=True),
        Option("eta_cutoff", _problem, neutral=0.0, draws=True),
    )
    state: ClassVar = (
        StateSpec("epsilon_cutoff", (N,), torch.float32),
        StateSpec("eta_cutoff", (N,), torch.float32),
    )

    def place(self, values: Mapping[str, Any], prompt_length: int) -> dict[str, Any]:
        return {name: float(value) for name, value in values.items()}

    def apply(self, scores: torch.Tensor, context: torch.Tensor, length: torch.Tensor, *state: torch.Tensor) -> None:
        epsilon, eta = (limit[:, None, None] for limit in state)
        _mask_below(scores, scores.softmax(-1), epsilon)
        information = -scores.log_softmax(-1)
        probability = scores.softmax(-1)
        entropy = row_sums(torch.where(probability > 0, information * probability, 0.0))
        _mask_below(scores, probability, torch.minimum(eta, eta.sqrt() * (-entropy).exp()))


def _mask_below(scores: torch.Tensor, probability: torch.Tensor, limit: torch.Tensor) -> None:
    greatest = scores.amax(-1, keepdim=True)
    scores.masked_fill_((probability < limit) & (scores < greatest), float("-inf"))

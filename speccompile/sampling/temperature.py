"""Temperature: scores are divided by it; 0 chooses the greatest."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch

from speccompile.graph.state import N, StateSpec
from speccompile.sampling.base import GREATEST, SMALLEST, Option, Processor, number


def _problem(value: Any, vocab: int) -> str | None:
    problem = number(0, GREATEST)(value, vocab)
    if problem is None and 0 < value < SMALLEST:
        return f"below {SMALLEST:g} scores could overflow; take 0, which chooses the greatest"
    return problem


class Temperature(Processor):
    """transformers' ``TemperatureLogitsWarper``. A slot at 0 draws nothing and is left as it is."""

    name = "temperature"
    options: ClassVar = (Option("temperature", _problem, default=1.0, draws=True),)
    state: ClassVar = (StateSpec("temperature", (N,), torch.float32),)

    def place(self, values: Mapping[str, Any], prompt_length: int) -> dict[str, Any]:
        return {"temperature": float(values["temperature"])}

    def active(self, *state: torch.Tensor) -> bool:
        return bool(((state[0] != 0) & (state[0] != 1)).any())

    def apply(self, scores: torch.Tensor, context: torch.Tensor, length: torch.Tensor, *state: torch.Tensor) -> None:
        (temperature,) = state
        scores.div_(torch.where(temperature == 0, 1.0, temperature)[:, None, None])

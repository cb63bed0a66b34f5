"""Temperature: scores are divided by it. A temperature below 1e-5 chooses the greatest score."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch

from speccompile.graph.state import N, StateSpec
from speccompile.sampling.base import GREATEST, Option, Processor, number

#: A lower temperature chooses the greatest score, as in vLLM: scores divided by it could overflow.
LEAST_TEMPERATURE = 1e-5


class Temperature(Processor):
    """transformers' ``TemperatureLogitsWarper``. The scores of a slot at 0, which draws nothing, do not change."""

    name = "temperature"
    options: ClassVar = (Option("temperature", number(0, GREATEST), default=1.0, draws=True),)
    state: ClassVar = (StateSpec("temperature", (N,), torch.float32),)

    def place(self, values: Mapping[str, Any], prompt_length: int) -> dict[str, Any]:
        return {"temperature": float(values["temperature"])}

    def has_effect(self, values: Mapping[str, Any]) -> bool:
        return values["temperature"] not in (0, 1)

    def apply(self, scores: torch.Tensor, context: torch.Tensor, length: torch.Tensor, *state: torch.Tensor) -> None:
        (temperature,) = state
        scores.div_(torch.where(temperature == 0, 1.0, temperature)[:, None, None])

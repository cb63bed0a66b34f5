"""Predicted outputs: a request brings the text that it expects, and drafts come from that text.

After the OpenAI API's ``prediction`` and Yang et al., "Inference with Reference" (2023). An edit of a file repeats most
of the file, and the client has it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

import speccompile.ops.prediction  # noqa: F401  registers the op
from speccompile.graph.state import N, S, StateSpec
from speccompile.modes.ready_mode import ReadyMode


@dataclass(frozen=True)
class Prediction(ReadyMode):
    """Continues the request's predicted text (``Engine.submit(prediction=...)``) after the newest tokens. A request
    without one has no drafts, so this drafter is usually the first of several: ``mode=["prediction", "suffix"]``.

    A slot has room for a prediction of ``max_len`` tokens, 8 bytes each.
    """

    name: ClassVar[str] = "prediction"
    scored: ClassVar[bool] = True
    own_state: ClassVar[tuple[str, ...]] = ("prompt_length", "prediction", "prediction_length")

    def state(self, tiers: Sequence[int]) -> list[StateSpec]:
        i64 = torch.int64
        return [
            *super().state(tiers),
            StateSpec("prediction", (N, S), i64, high=2),
            StateSpec("prediction_length", (N,), i64, high=S),
        ]

    def propose(
        self, tokens: torch.Tensor, length: torch.Tensor, *own_state: torch.Tensor, draft_len: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """See :func:`speccompile.ops.prediction.reference`."""
        slots, *tables = own_state
        drafts, lens, chances = torch.ops.speccompile.match_prediction(slots, tokens, length, *tables, draft_len)
        return drafts, lens, chances

    def explain(self) -> str:
        return "continues the text that a request predicts, after the longest match of the newest tokens"

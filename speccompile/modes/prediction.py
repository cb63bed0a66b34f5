"""Predicted outputs: a request includes the text that it expects, and drafts come from that text.

Source: the OpenAI API's ``prediction``, and Yang et al., "Inference with Reference" (2023). Example: the result of an
edit repeats most of a file, and the client has the file.
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
    """Drafts the continuation of the newest tokens in the request's predicted text (``Engine.submit(prediction=...)``).

    A request without a prediction has no drafts. This drafter is therefore usually the first of several:
    ``mode=["prediction", "suffix"]``. A slot stores a prediction of up to ``max_len`` tokens, 8 bytes each.
    """

    name: ClassVar[str] = "prediction"
    scored: ClassVar[bool] = True
    drafts_trees: ClassVar[bool] = True
    scored_trees: ClassVar[bool] = True
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
        """Propose the tokens after the match; see :func:`speccompile.ops.prediction.reference`."""
        slots, *tables = own_state
        drafts, lens, chances = torch.ops.speccompile.match_prediction(slots, tokens, length, *tables, draft_len)
        return drafts, lens, chances

    def propose_tree(
        self, tokens: torch.Tensor, length: torch.Tensor, *own_state: torch.Tensor, nodes: int
    ) -> tuple[torch.Tensor, ...]:
        """The tree of one branch that :meth:`propose` proposes."""
        drafts, lens, chances = self.propose(tokens, length, *own_state, draft_len=nodes)
        return drafts, torch.arange(nodes, device=drafts.device).expand(drafts.shape), lens, chances

    def explain(self) -> str:
        return "continues the text that a request predicts, after the longest match of the newest tokens"

"""Guided decoding: only tokens with a transition in the request's automaton can be chosen."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch

from speccompile.graph.state import N, StateSpec, V
from speccompile.guides.guide import COMPLETE, DEAD, Guide
from speccompile.sampling.automata import Automata, no_row_is_guided
from speccompile.sampling.base import Option, Processor

TABLE_CAPACITY = 2**18


def _problem(value: Any, vocab: int) -> str | None:
    if not isinstance(value, Guide):
        return "it must be a Guide: speccompile.guides.json_schema_guide(schema, tokenizer), or regex_guide"
    if len(value.classes) > vocab:
        return f"its tokenizer has {len(value.classes)} tokens, and the model {vocab}"
    if value.table_size > TABLE_CAPACITY:
        return f"its table has {value.table_size} entries, and a slot holds at most {TABLE_CAPACITY}; simplify it"
    return None


class FollowGuide(Processor):
    """Set the scores of tokens without a transition in the slot's automaton to -inf, at each position of the step.

    ``guide_state`` is the state after the committed tokens; the op ``advance_guide_`` updates it. The states of later
    positions follow the drafts before them. Nothing is forbidden after a draft that is not allowed, since it is never
    accepted. A sequence that is complete ends, even if an earlier processor forbids EOS tokens, as ``min_new_tokens``
    does.
    """

    name = "guide"
    options: ClassVar = (Option("guide", _problem, forbids=True),)
    state: ClassVar = (
        StateSpec("guide_state", (N,), torch.int64, fill=DEAD, low=DEAD, high=2),
        StateSpec("guide_width", (N,), torch.int64, fill=1, low=1, high=3),
        StateSpec("guide_classes", (N, V), torch.int32, high=2),
        StateSpec("guide_moves", (N, TABLE_CAPACITY), torch.int16, fill=DEAD, low=COMPLETE, high=2),
    )
    whole: ClassVar = True

    def place(self, values: Mapping[str, Any], prompt_length: int) -> dict[str, Any]:
        classes, moves = values["guide"]
        return {
            "guide_state": 0,
            "guide_width": moves.shape[1],
            "guide_classes": classes,
            "guide_moves": moves.flatten(),
        }

    def call(
        self,
        scores: torch.Tensor,
        context: torch.Tensor,
        length: torch.Tensor,
        drafted: int,
        state: Sequence[torch.Tensor],
    ) -> None:
        slots, guide_state, *tables = state
        if no_row_is_guided(guide_state, slots):
            return
        automata, now = Automata(slots, *tables), guide_state[slots]
        for step in range(-drafted, scores.shape[1]):
            if step >= 0:
                allowed, here = automata.tokens(now), scores[:, step]
                here.masked_fill_(~allowed, float("-inf"))
                here.masked_fill_(allowed & automata.are_complete(now)[:, None] & here.isneginf(), 0.0)
            place = (length + step).clamp(max=context.shape[1] - 1)
            now = automata.move(now, context.gather(1, place[:, None])[:, 0])

    def apply(self, scores: torch.Tensor, context: torch.Tensor, length: torch.Tensor, *state: torch.Tensor) -> None:
        self.call(scores, context, length, 0, state)

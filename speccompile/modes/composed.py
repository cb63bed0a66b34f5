"""Several drafters: each row uses the draft of the first drafter whose draft is good enough."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from speccompile.errors import InvalidOption
from speccompile.graph.state import N, StateSpec
from speccompile.graph_capture.model_info import ModelInfo
from speccompile.modes.base import DRAFT_SOURCE
from speccompile.modes.ready_mode import ReadyMode
from speccompile.passes.step.propose import ProposeFunction


@dataclass(frozen=True)
class FirstPassing:
    """The first proposal of each row that passes.

    Args:
        drafters: for each drafter, the function that proposes, the number of its state tensors, and whether it returns
            scores.
        min_score, last_always: the options of :class:`Composed`.
    """

    drafters: tuple[tuple[ProposeFunction, int, bool], ...]
    min_score: float
    last_always: bool

    def propose(
        self, tokens: torch.Tensor, length: torch.Tensor, *own_state: torch.Tensor, draft_len: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Choose a proposal for each row. All drafters propose in every step, since this updates their state.

        Args:
            own_state: slots ``[B]``, the state :data:`~speccompile.modes.base.DRAFT_SOURCE`, and the state tensors of
                each drafter in order.
        """
        slots, source, *tables = own_state
        taken = []
        for propose, count, _ in self.drafters:
            own, tables = tables[:count], tables[count:]
            taken.append(propose(tokens, length, *([slots] if own else []), *own, draft_len=draft_len))
        last = len(self.drafters) - 1
        # If no lookup passes and last_always is not set, the index is that of the network, which comes after the
        # lookups.
        by = torch.full_like(length, last if self.last_always else last + 1)
        chosen: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None
        # In reverse order: a draft that passes replaces the draft of a later drafter.
        for place in range(last, -1, -1):
            (_, _, scored), (drafts, lens, *own_scores) = self.drafters[place], taken[place]
            # A drafter without scores gets scores of 1; policies calibrate them.
            scores = own_scores[0] if scored else torch.ones_like(drafts, dtype=torch.float32)
            if chosen is None:
                chosen = drafts, lens if self.last_always else torch.zeros_like(lens), scores
                if self.last_always:
                    continue
            offsets = torch.arange(draft_len, device=drafts.device)
            expected = torch.where(offsets < lens[:, None], scores, 0.0).sum(1)
            passes = (lens > 0) & (expected >= self.min_score) if scored else lens > 0
            chosen = (
                torch.where(passes[:, None], drafts, chosen[0]),
                torch.where(passes, lens, chosen[1]),
                torch.where(passes[:, None], scores, chosen[2]),
            )
            by = torch.where(passes, place, by)
        assert chosen is not None
        source.index_put_((slots,), by)
        return chosen


@dataclass(frozen=True)
class Composed(ReadyMode):
    """Several drafters, such as ``mode=["suffix", "ngram"]``.

    A draft with scores passes if at least ``min_score`` of its tokens are expected to be accepted: the sum of its
    cumulative probabilities, Arctic's score. A draft without scores always passes.

    Args:
        drafters: the drafters, from first to last choice.
        min_score: the expected number of accepted tokens, at least 0.
        last_always: the last drafter's draft passes with any score.
    """

    drafters: tuple[ReadyMode, ...] = ()
    min_score: float = 1.0
    last_always: bool = True

    name: ClassVar[str] = "composed"
    scored: ClassVar[bool] = True

    @property
    def drafter_names(self) -> tuple[str, ...]:
        return tuple(drafter.name for drafter in self.drafters)

    @property
    def own_state(self) -> tuple[str, ...]:  # type: ignore[override]
        return (DRAFT_SOURCE, *(name for drafter in self.drafters for name in drafter.own_state))

    def check(self, info: ModelInfo) -> None:
        good = isinstance(self.min_score, int | float) and not isinstance(self.min_score, bool) and self.min_score >= 0
        if not good:
            reason = "it must be a number of at least 0"
            raise InvalidOption(where=f"mode {self.label!r}", name="min_score", value=self.min_score, reason=reason)
        for drafter in self.drafters:
            drafter.check(info)

    def state(self, tiers: Sequence[int]) -> list[StateSpec]:
        shared = super().state(tiers)
        known = {spec.name for spec in shared}
        source = StateSpec(DRAFT_SOURCE, (N,), torch.int64, high=2)
        own = [spec for drafter in self.drafters for spec in drafter.state(()) if spec.name not in known]
        return [*shared, source, *own]

    @property
    def _choice(self) -> FirstPassing:
        parts = [(drafter.proposer, len(drafter.own_state), drafter.scored) for drafter in self.drafters]
        return FirstPassing(tuple(parts), self.min_score, self.last_always)

    @property
    def proposer(self) -> ProposeFunction:
        return self._choice.propose

    def propose(
        self, tokens: torch.Tensor, length: torch.Tensor, *own_state: torch.Tensor, draft_len: int
    ) -> tuple[torch.Tensor, ...]:
        return self._choice.propose(tokens, length, *own_state, draft_len=draft_len)

    def explain(self) -> str:
        parts = "; else ".join(f"{drafter.name} {drafter.explain()}" for drafter in self.drafters)
        return f"{parts}. A draft is not used if fewer than {self.min_score:g} of its tokens are expected to be right"

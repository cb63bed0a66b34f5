"""Base classes of modes whose drafter is a head over the target's hidden states."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

from torch import nn

from speccompile.graph.state import StateSpec
from speccompile.graph.step_form import StepForm
from speccompile.graph.tree import depth_of
from speccompile.graph_capture.model_info import ModelInfo
from speccompile.modes.network.catch_up import CatchUpHead, KeepUnread, unread_state
from speccompile.modes.network.draft_first import DraftFirst, first_draft_state
from speccompile.modes.network.draft_head import DraftHead
from speccompile.modes.network.draft_segments import DraftSegment
from speccompile.modes.network.head_passes import DraftByHead, KeepHeadWarm
from speccompile.modes.network.head_tree import DraftTreeByHead
from speccompile.modes.network.network_mode import NetworkMode, SplitMode
from speccompile.passes.base import Pass


@dataclass(frozen=True)
class HeadMode(NetworkMode):
    """A mode that drafts from hidden states of the target."""

    drafts_from_hidden: ClassVar[bool] = True


@dataclass(frozen=True)
class RecurrentHead(HeadMode, SplitMode):
    """A mode that drafts every token with one head. From the second draft token on, the head reads its own output.

    Args:
        confidence: choose the first draft when the previous step ends, and report the head's probability of it to
            policies that learn. Steps without drafts then also compute the head's logits.
    """

    confidence: bool = False

    drafts_trees: ClassVar[bool] = True

    def check(self, info: ModelInfo) -> None:
        super().check(info)
        if not isinstance(self.confidence, bool):
            raise self.invalid("confidence", self.confidence, "use True or False")

    def chain(self, form: StepForm) -> Pass:
        """The pass that drafts a whole chain."""
        return DraftByHead(*form.chain, first_stored=self.confidence)

    def drafting(self, form: StepForm) -> list[Pass]:
        before = [CatchUpHead(form.deepest + 1)] * (self.catches_up and not form.reads_prompts)
        if form.tree is not None:
            return [*before, DraftTreeByHead(form.tree, form.draws, form.probabilities)]
        if form.begin is not None:
            return [DraftSegment(*form.chain, first_stored=True, begin=form.begin)]
        return [*before, self.chain(form)]

    @property
    def catches_up(self) -> bool:
        # The confidence of a first draft is needed before it is known whether the head drafts.
        return not self.confidence

    def catching_up(self, form: StepForm) -> list[Pass]:
        return [CatchUpHead(form.chunk)]

    @property
    def drafts_chains_alone(self) -> str:
        if self.split and self.confidence:
            return "with confidence=True its drafter drafts in segments, unless fused=True"
        return "its drafter drafts all tokens at once" if self.one_forward else ""

    @property
    def adaptable_head(self) -> nn.Module | None:
        # Mask tokens are read in rows that belong to no sequence.
        return self.draft if isinstance(self.draft, DraftHead) and not self.one_forward else None

    def with_head(self, head: Any) -> Self:
        return replace(self, draft=head)

    @property
    def drafts_in_segments(self) -> bool:
        return self.split and self.confidence and not self.one_forward

    def after_commit(self, form: StepForm) -> list[Pass]:
        if self.catches_up and not form.reads_prompts:
            return [KeepUnread()]
        return [KeepHeadWarm(notes_read=self.catches_up and not form.chunk), *[DraftFirst()] * self.confidence]

    def state(self, tiers: Sequence[int]) -> list[StateSpec]:
        own = first_draft_state() if self.confidence else []
        if isinstance(self.draft, DraftHead) and self.catches_up and (deepest := max(map(depth_of, tiers), default=0)):
            dtype = next(self.draft.parameters()).dtype
            own = unread_state(self.unread_tokens(deepest), self.draft.hidden_size, dtype)
        return [*super().state(tiers), *own]

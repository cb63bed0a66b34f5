"""What modes have in common whose drafter is a head over the target's hidden states."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar

from speccompile.graph.state import StateSpec
from speccompile.graph.tree import Tree
from speccompile.graph_capture.model_info import ModelInfo
from speccompile.modes.network.draft_first import DraftFirst, first_draft_state
from speccompile.modes.network.draft_segments import DraftSegment
from speccompile.modes.network.head_passes import DraftByHead, KeepHeadWarm
from speccompile.modes.network.head_tree import DraftTreeByHead
from speccompile.modes.network.network_mode import NetworkMode, SplitMode
from speccompile.modes.network.split import StoreDrafts
from speccompile.modes.network.split_tree import StoreTree, stored_tree_state
from speccompile.passes.base import Facts, Pass, facts
from speccompile.passes.step.tap_hidden import LowerTaps, MarkTaps, Tap


@dataclass(frozen=True)
class HeadMode(NetworkMode):
    """Drafts from hidden states of the target."""

    drafts_from_hidden: ClassVar[bool] = True
    goals: ClassVar[Facts] = facts("drafter_read")


@dataclass(frozen=True)
class RecurrentHead(HeadMode):
    """Drafts with one head for every draft token: from the second on it reads its own output.

    Args:
        confidence: choose the first draft when the step before ends, and report the head's probability of it to
            policies that learn. Steps without drafts then compute the head's logits, too.
    """

    confidence: bool = False

    drafts_trees: ClassVar[bool] = True

    def check(self, info: ModelInfo) -> None:
        super().check(info)
        if not isinstance(self.confidence, bool):
            raise self.invalid("confidence", self.confidence, "use True or False")

    @property
    @abstractmethod
    def taps(self) -> tuple[Tap, ...]:
        """Where the target's hidden states are read."""

    def drafting(self, draft_len: int, *, draws: bool = False, probabilities: bool = False) -> Pass:
        """The pass that drafts."""
        return DraftByHead(draft_len, draws, probabilities, first_stored=self.confidence)

    def draft_passes(self, draft_len: int) -> list[Pass]:
        return [self.drafting(draft_len)]

    def sampled_draft_passes(self, draft_len: int, *, probabilities: bool) -> list[Pass]:
        return [self.drafting(draft_len, draws=True, probabilities=probabilities)]

    def tree_draft_passes(self, tree: Tree, *, draws: bool = False) -> list[Pass]:
        return [DraftTreeByHead(tree, draws)]

    @property
    def drafts_chains_alone(self) -> str:
        return "its drafter drafts all tokens at once" if self.one_forward else ""

    def mark_passes(self) -> list[Pass]:
        return [MarkTaps(self.taps)]

    def commit_passes(self) -> list[Pass]:
        return [LowerTaps(), KeepHeadWarm(), *[DraftFirst()] * self.confidence]

    def state(self) -> list[StateSpec]:
        return [*super().state(), *(first_draft_state() if self.confidence else [])]


@dataclass(frozen=True)
class SplitHead(RecurrentHead, SplitMode):
    """The same, drafting before the step. Keeping the head warm stays part of the target's executables, where the
    hidden states are."""

    def drafter_passes(self, draft_len: int, *, draws: bool, probabilities: bool) -> list[Pass]:
        if not draft_len:
            return []
        drafts = self.drafting(draft_len, draws=draws, probabilities=probabilities)
        return [drafts, StoreDrafts(probabilities)]

    def tree_drafter_passes(self, tree: Tree, *, draws: bool) -> list[Pass]:
        return [*self.tree_draft_passes(tree, draws=draws), StoreTree()]

    def tree_state(self) -> list[StateSpec]:
        return stored_tree_state() if self.split else []

    @property
    def drafts_chains_alone(self) -> str:
        segments = "with confidence=True its drafter drafts in segments, unless fused=True"
        return segments if self.split and self.confidence else super().drafts_chains_alone

    @property
    def drafts_in_segments(self) -> bool:
        return self.split and self.confidence and not self.one_forward

    def segment_passes(self, begin: int, draft_len: int, *, draws: bool, probabilities: bool) -> list[Pass]:
        drafts = DraftSegment(draft_len, draws, probabilities, first_stored=True, begin=begin)
        return [drafts, StoreDrafts(probabilities, begin=begin)]

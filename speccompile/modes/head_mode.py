"""What modes have in common whose drafter is a head over the target's hidden states."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar

from speccompile.graph_capture.support import ModelInfo
from speccompile.modes.base import Mode
from speccompile.passes.base import Facts, Pass, facts
from speccompile.passes.eagle3 import DraftByHead, KeepHeadWarm
from speccompile.passes.split import StoreDrafts
from speccompile.passes.tap_hidden import LowerTaps, MarkTaps, Tap


@dataclass(frozen=True)
class HeadMode(Mode):
    """Drafts from hidden states of the target.

    Args:
        draft: the head, or where it is.
        draft_max_len: most tokens of a text that it drafts for; rows behind are decoded without drafts.
    """

    draft: Any = None
    draft_max_len: int | None = None

    draft_probs: ClassVar[bool] = True
    reads_hidden: ClassVar[bool] = True
    goals: ClassVar[Facts] = facts("drafter_read")

    def check(self, info: ModelInfo) -> None:
        most = self.draft_max_len
        if not (most is None or (isinstance(most, int) and not isinstance(most, bool) and most >= 2)):
            raise self.invalid("draft_max_len", most, "it has to be an int of at least 2, or None")


class RecurrentHead(HeadMode):
    """Drafts with one head for every draft token: from the second on it reads its own output."""

    @property
    @abstractmethod
    def taps(self) -> tuple[Tap, ...]:
        """Where the target's hidden states are read."""

    def draft_passes(self, draft_len: int) -> list[Pass]:
        return [DraftByHead(draft_len)]

    def sampled_draft_passes(self, draft_len: int, *, probabilities: bool) -> list[Pass]:
        return [DraftByHead(draft_len, draws=True, probabilities=probabilities)]

    def commit_passes(self) -> list[Pass]:
        return [MarkTaps(self.taps), LowerTaps(), KeepHeadWarm()]


@dataclass(frozen=True)
class SplitHead(RecurrentHead):
    """The same with drafting in executables of its own, which run in front of the step. Keeping the head warm stays
    part of the target's executables, where the hidden states are.

    Args:
        fused: True drafts inside of the step.
    """

    fused: bool = False

    splits: ClassVar[bool] = True

    @property
    def split(self) -> bool:
        return not self.fused

    def check(self, info: ModelInfo) -> None:
        super().check(info)
        if not isinstance(self.fused, bool):
            raise self.invalid("fused", self.fused, "use True or False")

    def drafter_passes(self, draft_len: int, *, draws: bool, probabilities: bool) -> list[Pass]:
        return [DraftByHead(draft_len, draws, probabilities), StoreDrafts(probabilities)] if draft_len else []

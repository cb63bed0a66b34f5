"""The base class of modes whose drafter is a language model with the target's vocabulary."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from speccompile.graph.state import StateSpec
from speccompile.graph.step_form import StepForm
from speccompile.graph.tree import Tree
from speccompile.graph_capture.model_info import ModelInfo
from speccompile.modes.network.catch_up import CatchUpModel, read_state
from speccompile.modes.network.draft_tree import DraftTreeByNetwork
from speccompile.modes.network.network_mode import SplitMode
from speccompile.modes.network.passes import DraftByNetwork, ReadAlong
from speccompile.passes.base import Pass


@dataclass(frozen=True)
class DraftModelMode(SplitMode):
    """A mode that drafts chains and trees with a language model.

    A subclass defines :meth:`~speccompile.modes.base.Mode.network`, which returns a
    :class:`~speccompile.modes.network.draft_model.DraftModel`. ``max_len`` there already respects ``draft_max_len``.
    """

    #: :meth:`network` reads the option ``draft``. If not, the option is refused.
    reads_draft: ClassVar[bool] = False

    drafts_trees: ClassVar[bool] = True

    def check(self, info: ModelInfo) -> None:
        super().check(info)
        if self.draft is not None and not self.reads_draft:
            reason = (
                "this mode builds its own draft model; leave the option out, or set reads_draft = True in its class"
            )
            raise self.invalid("draft", self.draft, reason)

    @property
    def catches_up(self) -> bool:
        return True

    def chain(self, form: StepForm) -> Pass:
        """The pass that drafts a whole chain."""
        return DraftByNetwork(*form.chain)

    def tree(self, tree: Tree, form: StepForm) -> Pass:
        """The pass that drafts a tree."""
        return DraftTreeByNetwork(tree, form.draws, form.probabilities)

    def drafting(self, form: StepForm) -> list[Pass]:
        drafts = self.chain(form) if form.tree is None else self.tree(form.tree, form)
        return [*[CatchUpModel(form.deepest + 1)] * (self.catches_up and not form.reads_prompts), drafts]

    def catching_up(self, form: StepForm) -> list[Pass]:
        return [CatchUpModel(form.chunk)]

    def after_commit(self, form: StepForm) -> list[Pass]:
        if self.catches_up and not form.reads_prompts:
            return []
        return [ReadAlong(notes_read=self.catches_up and not form.chunk)]

    def state(self, tiers: Sequence[int]) -> list[StateSpec]:
        return [*super().state(tiers), *(read_state() if self.catches_up and any(tiers) else [])]

"""The base class of modes whose drafter is a language model with the target's vocabulary."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from speccompile.graph.step_form import StepForm
from speccompile.graph_capture.model_info import ModelInfo
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

    def drafting(self, form: StepForm) -> list[Pass]:
        return [DraftByNetwork(*form.chain) if form.tree is None else DraftTreeByNetwork(form.tree, form.draws)]

    def after_commit(self, form: StepForm) -> list[Pass]:
        return [ReadAlong()]

"""The base class of acceptance rules. A rule computes a step's tokens from its drafts and the target's scores."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar

from speccompile.graph.state import StateSpec
from speccompile.graph.step_form import StepForm
from speccompile.graph_capture.model_info import ModelInfo
from speccompile.passes.base import Pass
from speccompile.utils.earlier_members import refuse_earlier_members

#: The replacement of each member that an earlier version called.
_EARLIER = {
    "passes(kind)": "Write passes(form), with form.kind in place of kind",
    "tree_passes": "Return the passes from passes(form), which has the tree as form.tree",
}


@dataclass(frozen=True)
class Rule(ABC):
    """A rule that accepts or rejects draft tokens. The fields of the dataclass are its options.

    A new rule is one file, and an entry in ``speccompile.acceptance.RULES``.
    """

    name: ClassVar[str]
    #: The emitted tokens have the distribution of the target's own tokens.
    lossless: ClassVar[bool]
    #: The emitted tokens equal those that plain decoding draws with the same seed.
    text_invariant: ClassVar[bool]
    #: The rule reads the drafter's probabilities, if the drafter has any.
    uses_draft_probs: ClassVar[bool] = False
    #: The rule needs the drafter's probabilities: ``wrap`` refuses a mode without them.
    needs_draft_probs: ClassVar[bool] = False
    #: The drafts may be a tree: :meth:`passes` supports a form with a ``tree``.
    judges_trees: ClassVar[bool] = False
    #: The reason why not, for a rule that cannot judge them.
    chains_alone: ClassVar[str] = ""
    #: The rule has passes of the kind ``drawn``: it uses the target's logits only to choose a token.
    draws_without_scores: ClassVar[bool] = False
    #: The rule supports only greedy requests: requests that sample are refused.
    greedy_only: ClassVar[bool] = False
    #: Every row has as many drafts as the tier, also if the drafter proposes fewer.
    fills_drafts: ClassVar[bool] = False
    #: The rule may accept tokens that a request's options forbid: requests with a guide or a prefix function are
    #: refused.
    breaks_guides: ClassVar[bool] = False

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        refuse_earlier_members(cls, "speccompile.acceptance.Rule", _EARLIER)

    def check(self, info: ModelInfo) -> None:  # noqa: B027  most rules fit every model
        """Refuse options that do not fit the target model.

        Raises:
            InvalidOption: the message states the values that fit.
        """

    def state(self) -> list[StateSpec]:
        """The rule's own state tensors."""
        return []

    @abstractmethod
    def passes(self, form: StepForm) -> list[Pass]:
        """Passes that require the facts ``step_logits`` and ``drafts`` and provide ``accepted``, in a step of ``form``.

        They name two values: ``target_tokens`` ``[B, K+1]``, the accepted drafts and the tokens after them, and
        ``row_accepted`` ``[B]``, the number of accepted drafts. ``form.kind`` is ``greedy`` or ``sampled``, or
        ``drawn`` for a rule that :attr:`draws_without_scores`.

        In a form with a ``tree``, which only a rule that :attr:`judges_trees` receives, they also name ``path``;
        ``target_tokens`` and ``path`` are ``[B, 1 + depth]``. There the kind may also be ``scored``: the passes then
        name the values that :class:`~speccompile.passes.step.tree_accept.JoinScores` reads.
        """

    def commit_passes(self) -> list[Pass]:
        """Passes that run after the commit."""
        return []

    @abstractmethod
    def explain(self) -> str:
        """A description in one sentence, for a report."""

"""What an acceptance rule is: how a step's drafts and the target's scores become its tokens."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

from speccompile.graph.keys import Kind
from speccompile.graph.state import StateSpec
from speccompile.graph.tree import Tree
from speccompile.graph_capture.model_info import ModelInfo
from speccompile.passes.base import Pass


@dataclass(frozen=True)
class Rule(ABC):
    """The fields of the dataclass are its options. A new rule is one file, listed in
    ``speccompile.acceptance.RULES``."""

    name: ClassVar[str]
    #: Emitted tokens are distributed as the target's own.
    lossless: ClassVar[bool]
    #: They are the very tokens that plain decoding draws from the same seed.
    text_invariant: ClassVar[bool]
    #: It looks at the drafter's probabilities, where the drafter has any.
    uses_draft_probs: ClassVar[bool] = False
    #: It is another rule where the drafter has none: ``wrap`` refuses such a mode.
    needs_draft_probs: ClassVar[bool] = False
    #: Drafts may be a tree, which :meth:`tree_passes` judge.
    judges_trees: ClassVar[bool] = False
    #: It has passes of the kind ``drawn``: all that it does with the target's logits is to choose a token.
    draws_without_scores: ClassVar[bool] = False
    #: It decides nothing about tokens that are drawn: requests that sample are refused.
    greedy_only: ClassVar[bool] = False
    #: Rows get as many drafts as the tier has places, also where the drafter proposes fewer.
    fills_drafts: ClassVar[bool] = False
    #: It may accept what a request's options forbid: requests whose every token has to be an allowed one are refused.
    breaks_guides: ClassVar[bool] = False

    def check(self, info: ModelInfo) -> None:  # noqa: B027  most rules fit every model
        """Refuse options that do not fit the target model.

        Raises:
            InvalidOption: with what would fit.
        """

    def state(self) -> list[StateSpec]:
        """State tensors of the rule's own."""
        return []

    @abstractmethod
    def passes(self, kind: Kind) -> list[Pass]:
        """Passes from the facts ``step_logits`` and ``drafts`` to the fact ``accepted``: they name ``target_tokens``
        ``[B, K+1]``, what is emitted if all of it is, and ``row_accepted`` ``[B]``."""

    def tree_passes(self, tree: Tree, kind: Kind) -> list[Pass]:
        """Passes of a rule that :attr:`judges_trees`, in a step of that shape, with the facts of :meth:`passes`: they
        name ``target_tokens`` and ``path`` ``[B, 1 + depth]``, and ``row_accepted`` ``[B]``; of the kind ``scored``
        also what :class:`~speccompile.passes.step.tree_accept.JoinScores` reads."""
        raise NotImplementedError(f"rule {self.name!r} has judges_trees, and needs tree_passes")

    def commit_passes(self) -> list[Pass]:
        """Passes that run after the commit."""
        return []

    @abstractmethod
    def explain(self) -> str:
        """One sentence for people."""

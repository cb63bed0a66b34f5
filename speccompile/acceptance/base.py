"""The base class of acceptance rules. A rule computes a step's tokens from its drafts and the target's scores."""

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
    #: The drafts may be a tree: the rule has :meth:`tree_passes`.
    judges_trees: ClassVar[bool] = False
    #: The rule has passes of the kind ``drawn``: it uses the target's logits only to choose a token.
    draws_without_scores: ClassVar[bool] = False
    #: The rule supports only greedy requests: requests that sample are refused.
    greedy_only: ClassVar[bool] = False
    #: Every row has as many drafts as the tier, also if the drafter proposes fewer.
    fills_drafts: ClassVar[bool] = False
    #: The rule may accept tokens that a request's options forbid: requests with a guide or a prefix function are
    #: refused.
    breaks_guides: ClassVar[bool] = False

    def check(self, info: ModelInfo) -> None:  # noqa: B027  most rules fit every model
        """Refuse options that do not fit the target model.

        Raises:
            InvalidOption: the message states the values that fit.
        """

    def state(self) -> list[StateSpec]:
        """The rule's own state tensors."""
        return []

    @abstractmethod
    def passes(self, kind: Kind) -> list[Pass]:
        """Passes that require the facts ``step_logits`` and ``drafts`` and provide ``accepted``.

        They name two values: ``target_tokens`` ``[B, K+1]``, the accepted drafts and the tokens after them, and
        ``row_accepted`` ``[B]``, the number of accepted drafts.
        """

    def tree_passes(self, tree: Tree, kind: Kind) -> list[Pass]:
        """Passes of a rule that :attr:`judges_trees`, in a step of the shape ``tree``, with the facts of
        :meth:`passes`.

        They name ``target_tokens`` and ``path`` ``[B, 1 + depth]``, and ``row_accepted`` ``[B]``. Those of the kind
        ``scored`` also name the values that :class:`~speccompile.passes.step.tree_accept.JoinScores` reads.
        """
        raise NotImplementedError(f"rule {self.name!r} has judges_trees = True: implement its tree_passes")

    def commit_passes(self) -> list[Pass]:
        """Passes that run after the commit."""
        return []

    @abstractmethod
    def explain(self) -> str:
        """A description in one sentence, for a report."""

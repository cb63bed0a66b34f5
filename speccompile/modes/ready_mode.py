"""The base class of modes whose drafts are ready when a step ends: they propose only from the committed tokens."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from speccompile.graph.state import K, N, StateSpec
from speccompile.graph.step_form import StepForm
from speccompile.graph.tree import PROPOSAL, Tree
from speccompile.modes.base import Mode
from speccompile.passes.base import Pass
from speccompile.passes.step.drafts import ReadDrafts
from speccompile.passes.step.propose import Propose, ProposeFunction
from speccompile.passes.step.propose_tree import ProposeTree
from speccompile.passes.step.tree_drafts import ReadTree


def proposal_state(tiers: Sequence[int] = ()) -> list[StateSpec]:
    """State tensors that store proposals for the next step.

    Args:
        tiers: draft lengths and trees. If one is a tree, there are also tensors for proposals of trees.
    """
    i64, (tokens, parents, count) = torch.int64, PROPOSAL
    chains = [StateSpec("draft_tokens", (N, K), i64, low=0, high=2), StateSpec("draft_lens", (N,), i64, high=K + 1)]
    if not any(isinstance(shape, Tree) for shape in tiers):
        return chains
    trees = [StateSpec(name, (N, K), i64, low=0, high=1) for name in (tokens, parents)]
    return [*chains, *trees, StateSpec(count, (N,), i64, high=K + 1)]


@dataclass(frozen=True)
class ReadyMode(Mode):
    """A mode that proposes drafts from the committed tokens. A subclass only defines :meth:`propose`, in plain
    PyTorch."""

    ready: ClassVar[bool] = True

    #: The names of the mode's own state tensors that ``propose`` receives.
    own_state: ClassVar[tuple[str, ...]] = ()
    #: ``propose`` also returns the probabilities of its drafts.
    scored: ClassVar[bool] = False
    #: ``propose_tree`` also returns the probabilities of its drafts.
    scored_trees: ClassVar[bool] = False

    @abstractmethod
    def propose(
        self, tokens: torch.Tensor, length: torch.Tensor, *own_state: torch.Tensor, draft_len: int
    ) -> tuple[torch.Tensor, ...]:
        """Propose draft tokens for every row.

        Args:
            tokens: int64 ``[B, S]``, each row's sequence. Only the first ``length`` tokens are valid.
            length: int64 ``[B]``, the number of committed tokens, including the newest.
            own_state: for a mode with names in :attr:`own_state`: the rows' slots, int64 ``[B]``, followed by the whole
                state tensors (``[N, ...]``).
            draft_len: Kmax.

        Returns:
            Draft tokens, int64 ``[B, Kmax]``, and the number of valid ones, int64 ``[B]`` (0: no proposal). If
                ``scored``, also float32 ``[B, Kmax]``: for each draft, the probability that it and all drafts before it
                are right. Policies read these probabilities.
        """

    def propose_tree(
        self, tokens: torch.Tensor, length: torch.Tensor, *own_state: torch.Tensor, nodes: int
    ) -> tuple[torch.Tensor, ...]:
        """Propose a tree of draft tokens for every row, after :meth:`propose`. A mode that :attr:`drafts_trees` defines
        it.

        Args:
            tokens, length, own_state: the arguments of :meth:`propose`.
            nodes: P, the largest number of tokens of a proposal.

        Returns:
            Three tensors. Draft tokens, int64 ``[B, P]``: the likeliest first, and no token before its parent. Tiers of
                any shape use the first tokens that fit. The parent of each token, int64 ``[B, P]``: 0 for the newest
                committed token, else i + 1 for the draft token i. The number of valid tokens, int64 ``[B]``. If
                :attr:`scored_trees`, also float32 ``[B, P]``: for each token, the probability that it and all before
                it on its path are right. Several drafters merge their trees by them.
        """
        raise NotImplementedError(f"mode {self.name!r} has drafts_trees = True: define its propose_tree")

    @property
    def tree_proposer(self) -> ProposeFunction:
        """The function that steps call for :meth:`propose_tree`; see :attr:`proposer`."""
        return self.propose_tree

    @property
    def proposer(self) -> ProposeFunction:
        """The function that steps call for :meth:`propose`.

        The keys of stored steps include this function and its object. Options that do not change a step must not change
        the key: such a mode returns a method of another object, which does not have these options.
        """
        return self.propose

    @property
    def whole_proposer(self) -> ProposeFunction | None:
        """:meth:`propose` over the sequences of all slots, ``tokens`` ``[N, S]`` and ``length`` ``[N]``, for the rows
        ``slots`` ``[B]``. They are the arguments before the tensors of :attr:`own_state`; ``draft_len`` and the step's
        ``facts``, for :func:`speccompile.ops.draft_rows.form_of`, are after them. None: steps copy the rows'
        sequences."""
        return None

    def state(self, tiers: Sequence[int]) -> list[StateSpec]:
        return [
            *proposal_state(tiers if self.drafts_trees else ()),
            *[StateSpec("draft_score", (N, K), torch.float32)] * self.scored,
        ]

    def drafting(self, form: StepForm) -> list[Pass]:
        return [ReadDrafts(form.drafts) if form.tree is None else ReadTree(form.tree)]

    def after_commit(self, form: StepForm) -> list[Pass]:
        tree = ProposeTree(self.tree_proposer, self.own_state, self.scored_trees)
        chain = Propose(self.proposer, self.own_state, self.whole_proposer, scored=self.scored)
        return [chain, *[tree] * (form.trees and self.drafts_trees)]

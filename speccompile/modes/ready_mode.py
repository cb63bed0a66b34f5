"""Modes whose drafts are ready when a step ends: they propose from the committed tokens alone."""

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
    """State in which proposals wait for the next step.

    Args:
        tiers: draft lengths and trees; a wrap with a tree has proposals of trees, too.
    """
    i64, (tokens, parents, count) = torch.int64, PROPOSAL
    chains = [StateSpec("draft_tokens", (N, K), i64, low=0, high=2), StateSpec("draft_lens", (N,), i64, high=K + 1)]
    if not any(isinstance(shape, Tree) for shape in tiers):
        return chains
    trees = [StateSpec(name, (N, K), i64, low=0, high=1) for name in (tokens, parents)]
    return [*chains, *trees, StateSpec(count, (N,), i64, high=K + 1)]


@dataclass(frozen=True)
class ReadyMode(Mode):
    """A drafter that proposes from committed text: write :meth:`propose`, in plain PyTorch, and that is all."""

    ready: ClassVar[bool] = True

    #: Names of own state tensors that ``propose`` wants to have.
    own_state: ClassVar[tuple[str, ...]] = ()
    #: ``propose`` also returns what it thinks of its drafts.
    scored: ClassVar[bool] = False

    @abstractmethod
    def propose(
        self, tokens: torch.Tensor, length: torch.Tensor, *own_state: torch.Tensor, draft_len: int
    ) -> tuple[torch.Tensor, ...]:
        """Draft tokens for every row.

        Args:
            tokens: int64 ``[B, S]``, each row's text; only the first ``length`` places count.
            length: int64 ``[B]``, committed tokens, the newest included.
            own_state: for a mode that names state tensors of its own in ``own_state``, the rows' slots, int64 ``[B]``,
                and then those tensors, whole (``[N, ...]``).
            draft_len: Kmax.

        Returns:
            Draft tokens, int64 ``[B, Kmax]``, and how many of them count, int64 ``[B]`` (0: no proposal). Where
            ``scored``, also float32 ``[B, Kmax]``: for each draft the probability that it and all before it are
            right, which policies look at.
        """

    def propose_tree(
        self, tokens: torch.Tensor, length: torch.Tensor, *own_state: torch.Tensor, nodes: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Of a mode that :attr:`drafts_trees`: a tree of draft tokens for every row. It runs after :meth:`propose`.

        Args:
            tokens, length, own_state: as :meth:`propose` has them.
            nodes: most tokens of a proposal, P.

        Returns:
            Draft tokens, int64 ``[B, P]``, the likeliest first, and no token before its parent: tiers of any shape take
            the first ones that fit. The parent of each, int64 ``[B, P]``: 0 for the newest committed token, else i + 1
            for the draft token i. How many there are, int64 ``[B]``.
        """
        raise NotImplementedError(f"mode {self.name!r} has drafts_trees, and needs propose_tree")

    @property
    def tree_proposer(self) -> ProposeFunction:
        """:meth:`propose_tree`, as steps hold it; see :attr:`proposer`."""
        return self.propose_tree

    @property
    def proposer(self) -> ProposeFunction:
        """:meth:`propose`, as steps hold it. Stored steps are known by it: where some options say nothing of how steps
        are made, it belongs to something that has the others alone."""
        return self.propose

    def state(self, tiers: Sequence[int]) -> list[StateSpec]:
        return [
            *proposal_state(tiers if self.drafts_trees else ()),
            *[StateSpec("draft_score", (N, K), torch.float32)] * self.scored,
        ]

    def drafting(self, form: StepForm) -> list[Pass]:
        return [ReadDrafts(form.drafts) if form.tree is None else ReadTree(form.tree)]

    def after_commit(self, form: StepForm) -> list[Pass]:
        trees = [ProposeTree(self.tree_proposer, self.own_state)] if form.trees and self.drafts_trees else []
        return [Propose(self.proposer, self.own_state, scored=self.scored), *trees]

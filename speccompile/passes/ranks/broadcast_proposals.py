"""Drafts that are proposed from hidden states are those of the first rank."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from speccompile.graph.step_graph import StepGraph
from speccompile.graph.tree import PROPOSAL
from speccompile.passes.base import Changes, Facts, Pass, PassRegion, facts
from speccompile.passes.ranks.broadcast_drafts import first_ranks
from speccompile.passes.step.independent_tree import CHOICES

#: State in which proposals wait for the next step: of a chain, and of trees.
PROPOSED = ("draft_tokens", "draft_lens", *PROPOSAL, CHOICES)


@dataclass(frozen=True)
class BroadcastProposals(Pass):
    """Replaces the rows' proposals for the next step by those of the first rank, in one message.

    As :class:`~speccompile.passes.ranks.broadcast_drafts.BroadcastDrafts`, for drafters whose proposals are ready when
    a step ends.

    Args:
        group, ranks: of the collective.
    """

    group: str
    ranks: int

    name: ClassVar[str] = "broadcast_proposals"
    looks_for: ClassVar[str] = "proposals from hidden states"
    region: ClassVar[PassRegion] = "propose"
    requires: ClassVar[Facts] = facts("proposed")
    provides: ClassVar[Facts] = facts("proposals_broadcast")

    def run(self, graph: StepGraph) -> Changes:
        names = [name for name in PROPOSED if name in graph.layout.tensors]
        state = [graph.state(name) for name in names]
        graph.insert(keep_first_ranks, graph.values["slots"], *state, group=self.group, ranks=self.ranks)
        return Changes(len(names), f"{', '.join(names)} of the first rank")


def keep_first_ranks(slots: torch.Tensor, *state: torch.Tensor, group: str, ranks: int) -> None:
    """Let the rows ``slots`` ``[B]`` of ``state``, int64 ``[N]`` or ``[N, n]`` each, be what the first rank has."""
    rows = first_ranks(*(tensor[slots] for tensor in state), group=group, ranks=ranks)
    for tensor, value in zip(state, rows, strict=True):
        tensor.index_put_((slots,), value)

"""The first rank's choice for all ranks, where each rank would choose by its own numbers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import fx

import speccompile.ops.collective  # noqa: F401  defines the ops
from speccompile.graph.step_graph import StepGraph
from speccompile.passes.base import Changes, Facts, Pass, PassRegion, facts
from speccompile.passes.ranks.broadcast_drafts import first_ranks

#: Values of a step that determine the emitted tokens. A tree also has its accepted path.
CHOSEN = ("target_tokens", "row_accepted", "path")


@dataclass(frozen=True)
class BroadcastChoice(Pass):
    """Replaces the chosen tokens and the number of accepted drafts by those of the first rank.

    Where the logits were gathered, all ranks have the same bits, and so choose the same: nothing changes. It applies
    where the lm_head is whole on every rank, or the rule compares the logits with probabilities of a drafter, which
    each rank computes: there last bits may differ, and with them a choice between near-ties.

    Args:
        group, ranks: of the collective.
        own_probs: the rule reads probabilities of a drafter.
    """

    group: str
    ranks: int
    own_probs: bool

    name: ClassVar[str] = "broadcast_choice"
    looks_for: ClassVar[str] = "a choice by numbers of each rank's own"
    region: ClassVar[PassRegion] = "choose"
    optional: ClassVar[bool] = True
    requires: ClassVar[Facts] = facts("step_logits", "accepted")
    provides: ClassVar[Facts] = facts("choice_equal")

    def run(self, graph: StepGraph) -> Changes:
        if not self.own_probs and gathered_of(graph.values["logits"]) is not None:
            return Changes(0, "all ranks choose from the same logits")
        names = [name for name in CHOSEN if name in graph.values]
        own = [graph.values[name] for name in names]
        shared = graph.insert(first_ranks, *own, group=self.group, ranks=self.ranks)
        for name, before, after in zip(names, own, shared, strict=True):
            before._rename(f"own_{name}")
            graph.name_value(name, after)
        return Changes(len(names), f"{', '.join(names)} of the first rank")


def gathered_of(logits: fx.Node) -> fx.Node | None:
    """The collective that ``logits`` come from, maybe through a scale or a soft cap; None without a collective."""
    node = logits
    while node.target is not torch.ops.speccompile.all_gather.default:
        inputs = node.all_input_nodes
        if node.op != "call_function" or len(inputs) != 1:
            return None
        (node,) = inputs
    return node

"""Outcome of a tree: the depth of its drafts, and the number of drafts that a chain would have had accepted.

The chain of the first choice at each depth is a part of the tree.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from speccompile.graph.state import N, StateSpec
from speccompile.graph.step_graph import StepGraph
from speccompile.graph.tree import Tree
from speccompile.ops.draft_rows import form_of
from speccompile.ops.verify_tree import judge_chain_
from speccompile.passes.base import Changes, Facts, Pass, PassRegion, facts


def tree_outcome_state() -> list[StateSpec]:
    """``chain_accepted``, ``chain_judged`` and ``deepest_draft`` int64 ``[N]``, of the newest step whose drafts were a
    tree."""
    return [StateSpec(name, (N,), torch.int64) for name in ("chain_accepted", "chain_judged", "deepest_draft")]


@dataclass(frozen=True)
class JudgeChain(Pass):
    """Counts, in a step of a tree, the drafts that a chain would have had accepted, for policies and statistics. No
    output depends on it."""

    tree: Tree

    name: ClassVar[str] = "judge_chain"
    looks_for: ClassVar[str] = "an accepted path"
    region: ClassVar[PassRegion] = "choose"
    requires: ClassVar[Facts] = facts("drafts", "tree", "accepted", "path")
    provides: ClassVar[Facts] = facts("chain_judged")

    def state_specs(self) -> list[StateSpec]:
        return tree_outcome_state()

    def run(self, graph: StepGraph) -> Changes:
        values = [graph.values[name] for name in ("drafts", "parents", "depths", "path", "row_accepted", "slots")]
        state = [graph.state(spec.name) for spec in self.state_specs()]
        graph.insert(form_of(judge_chain_, graph.facts), *values, *state, others=other_branches(self.tree))
        return Changes(1)


def other_branches(tree: Tree) -> tuple[int, ...]:
    """The nodes of a static tree that are not the first branch of their parent, from 1 on; empty for a dynamic tree,
    whose nodes are not known before a step.
    """
    if tree.parents is None:
        return ()
    return tuple(node for node, path in enumerate(tree.paths, 1) if path[-1])

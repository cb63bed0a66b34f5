"""Trees of a split drafter: they pass through the arena, as chains do."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch.nn.functional import pad

from speccompile.graph.state import K, N, StateSpec
from speccompile.graph.step_graph import StepGraph
from speccompile.graph.tree import Tree
from speccompile.modes.network.split import store
from speccompile.passes.base import Changes, Facts, Pass, facts
from speccompile.passes.step.tree_drafts import set_tree

#: State: draft tokens, their parents and depths, and how many there are. They are in the form of the tier.
STORED = ("stored_tree_tokens", "stored_tree_parents", "stored_tree_depths", "stored_tree_lens")


def stored_tree_state() -> list[StateSpec]:
    """State tensors with the tree of each slot between a drafter's executables and the step."""
    i64, *wide, lens = torch.int64, *STORED
    return [*(StateSpec(name, (N, K), i64, low=0, high=1) for name in wide), StateSpec(lens, (N,), i64, high=K + 1)]


@dataclass(frozen=True)
class StoreTree(Pass):
    """Leaves a step's tree for the target's executable."""

    name: ClassVar[str] = "store_tree"
    looks_for: ClassVar[str] = "a tree of drafts"
    requires: ClassVar[Facts] = facts("rows", "drafts", "tree")
    provides: ClassVar[Facts] = facts("drafts_stored")

    def run(self, graph: StepGraph) -> Changes:
        values = [graph.values[name] for name in ("slots", "drafts", "parents", "depths", "row_draft_lens")]
        state = [graph.state(name) for name in STORED]
        graph.insert(store_tree, *values, *state, before=graph.anchors.start)
        return Changes(len(state))


@dataclass(frozen=True)
class ReadStoredTree(Pass):
    """Takes what :class:`StoreTree` left in a step of the same shape."""

    tree: Tree

    name: ClassVar[str] = "read_stored_tree"
    looks_for: ClassVar[str] = "what the drafter's executable left"
    requires: ClassVar[Facts] = facts("rows")
    provides: ClassVar[Facts] = facts("drafts", "drafts_limited", "tree")

    def run(self, graph: StepGraph) -> Changes:
        state = [graph.state(name) for name in STORED]
        slots, start = graph.values["slots"], graph.anchors.start
        set_tree(graph, *graph.insert(stored_tree, slots, *state, before=start, nodes=int(self.tree)))
        return Changes(1, str(self.tree))


def store_tree(
    slots: torch.Tensor,
    drafts: torch.Tensor,
    parents: torch.Tensor,
    depths: torch.Tensor,
    lens: torch.Tensor,
    *state: torch.Tensor,
) -> None:
    """Write drafts ``[B, nodes]``, parents and depths ``[B, 1 + nodes]``, those of the root left out, and lengths
    ``[B]`` to ``state`` ``[N, ...]``. The places after them are filled with empty children of the root (-1), so that a
    tier of any width reads a valid tree."""
    rest = (0, state[0].shape[1] - drafts.shape[1])
    parents, depths = pad(parents[:, 1:], rest), pad(depths[:, 1:], rest, value=1)
    store(slots, pad(drafts, rest, value=-1), parents, depths, lens, *state)


def stored_tree(slots: torch.Tensor, *state: torch.Tensor, nodes: int) -> tuple[torch.Tensor, ...]:
    """The same of rows ``slots`` ``[B]``, those of the root put before them again."""
    drafts, parents, depths = (part[slots, :nodes] for part in state[:3])
    root = torch.zeros_like(slots)[:, None]
    return drafts, torch.cat([root - 1, parents], 1), torch.cat([root, depths], 1), state[3][slots]

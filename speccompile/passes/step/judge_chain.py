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
        values = [graph.values[name] for name in ("drafts", "parents", "path", "row_accepted")]
        found = graph.insert(chain_in_tree, *values, others=other_branches(self.tree))
        deepest = graph.insert(deepest_draft, graph.values["drafts"], graph.values["depths"])
        state = [graph.state(spec.name) for spec in self.state_specs()]
        graph.insert(store, graph.values["slots"], *found, deepest, *state)
        return Changes(1)


def other_branches(tree: Tree) -> tuple[int, ...]:
    """The nodes of a static tree that are not the first branch of their parent, from 1 on; empty for a dynamic tree,
    whose nodes are not known before a step.
    """
    if tree.parents is None:
        return ()
    return tuple(node for node, path in enumerate(tree.paths, 1) if path[-1])


def chain_in_tree(
    drafts: torch.Tensor, parents: torch.Tensor, path: torch.Tensor, accepted: torch.Tensor, *, others: tuple[int, ...]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Numbers of the chain's drafts that are accepted and that were judged: one more where the tree has the next.

    Args:
        drafts: ``[B, nodes]``, -1 for no draft; parents: ``[B, 1 + nodes]``. Of siblings the first in number is the
            likeliest.
        path: ``[B, 1 + depth]``, accepted: ``[B]``, of :func:`speccompile.ops.tree.walk_tree`.
        others: see :func:`other_branches`.

    Returns:
        Two of int64 ``[B]``.
    """
    of = parents[:, 1:]
    there = drafts >= 0
    # [B, node, earlier node]
    siblings = (of[:, :, None] == of[:, None, :]) & there[:, None, :]
    first = there & ~siblings.tril(-1).any(2)
    for node in others:
        first[:, node - 1].fill_(False)
    offsets = torch.arange(1, path.shape[1], device=path.device)
    on_chain = first.gather(1, (path[:, 1:] - 1).clamp(min=0)) & (offsets <= accepted[:, None])
    count = on_chain.long().cumprod(1).sum(1)
    end = path.gather(1, count[:, None])
    return count, count + (first & (of == end)).any(1)


def deepest_draft(drafts: torch.Tensor, depths: torch.Tensor) -> torch.Tensor:
    """The greatest depth of a node that has a draft, int64 ``[B]``; 0 where none has.

    Args:
        drafts: ``[B, nodes]``, -1 for no draft; depths: ``[B, 1 + nodes]``.
    """
    return torch.where(drafts >= 0, depths[:, 1:], 0).amax(1)


def store(slots: torch.Tensor, *found_and_state: torch.Tensor) -> None:
    """Write values ``[B]`` to as many state tensors ``[N]``, which follow them."""
    count = len(found_and_state) // 2
    for value, kept in zip(found_and_state[:count], found_and_state[count:], strict=True):
        kept.index_put_((slots,), value)

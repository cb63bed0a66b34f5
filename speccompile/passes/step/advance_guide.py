"""Guided decoding after a commit: the automata's new states, and the drafts of the next step that they allow."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from speccompile.graph.step_graph import StepGraph
from speccompile.graph.tree import PROPOSAL
from speccompile.passes.base import Changes, Facts, Pass, PassRegion, facts

_TABLES = ("guide_width", "guide_classes", "guide_moves")


@dataclass(frozen=True)
class AdvanceGuide(Pass):
    """Every slot's automaton reads the emitted tokens of the step."""

    name: ClassVar[str] = "advance_guide"
    looks_for: ClassVar[str] = "committed tokens"
    region: ClassVar[PassRegion] = "propose"
    requires: ClassVar[Facts] = facts("committed")
    provides: ClassVar[Facts] = facts("guide_advanced")

    def run(self, graph: StepGraph) -> Changes:
        most = int(graph.values["target_tokens"].meta["val"].shape[1])
        state = [graph.state(name) for name in ("tokens", "length", "emitted", *_TABLES)]
        graph.insert(advance, graph.state("guide_state"), graph.values["slots"], *state, most=most)
        return Changes(1, f"up to {most} tokens")


@dataclass(frozen=True)
class TruncateDrafts(Pass):
    """Truncates the proposals of a ready drafter before the first token that the guide forbids. The next step is then
    no wider than necessary."""

    name: ClassVar[str] = "truncate_drafts"
    looks_for: ClassVar[str] = "the proposals of a ready drafter"
    region: ClassVar[PassRegion] = "propose"
    requires: ClassVar[Facts] = facts("guide_advanced", "proposed")
    provides: ClassVar[Facts] = facts("drafts_truncated")

    def run(self, graph: StepGraph) -> Changes:
        state = [graph.state(name) for name in ("draft_tokens", "guide_state", *_TABLES)]
        graph.insert(truncate, graph.state("draft_lens"), graph.values["slots"], *state)
        return Changes(1)


@dataclass(frozen=True)
class TruncateTree(Pass):
    """Removes from a proposed tree the nodes that the guide forbids, and their descendants."""

    name: ClassVar[str] = "truncate_tree"
    looks_for: ClassVar[str] = "the tree that a ready drafter proposed"
    region: ClassVar[PassRegion] = "propose"
    requires: ClassVar[Facts] = facts("guide_advanced", "tree_proposed")
    provides: ClassVar[Facts] = facts("tree_truncated")

    def run(self, graph: StepGraph) -> Changes:
        state = [graph.state(name) for name in (*PROPOSAL, "guide_state", *_TABLES)]
        graph.insert(truncate_tree, graph.values["slots"], *state)
        return Changes(1)


def advance(
    guide_state: torch.Tensor,
    slots: torch.Tensor,
    tokens: torch.Tensor,
    length: torch.Tensor,
    emitted: torch.Tensor,
    *tables: torch.Tensor,
    most: int,
) -> None:
    """Move the automaton of each row over the tokens that the step emitted."""
    torch.ops.speccompile.advance_guide_(guide_state, slots, tokens, length, emitted, most, tables)


def truncate(draft_lens: torch.Tensor, slots: torch.Tensor, *others: torch.Tensor) -> None:
    """End each row's drafts before the first one that its automaton does not allow."""
    torch.ops.speccompile.truncate_drafts_(draft_lens, slots, *others[:2], others[2:])


def truncate_tree(slots: torch.Tensor, *state: torch.Tensor) -> None:
    """Remove the nodes of each row's tree that its automaton does not allow."""
    torch.ops.speccompile.truncate_trees_(*state[:3], slots, state[3], state[4:])

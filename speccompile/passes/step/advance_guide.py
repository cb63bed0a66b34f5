"""Guided decoding behind a commit: where the text has led, and which drafts of the next step lead on from there."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from speccompile.graph.step_graph import StepGraph
from speccompile.passes.base import Changes, Facts, Pass, facts

_TABLES = ("guide_width", "guide_classes", "guide_moves")


@dataclass(frozen=True)
class AdvanceGuide(Pass):
    """Every slot's automaton reads what the step has emitted."""

    name: ClassVar[str] = "advance_guide"
    looks_for: ClassVar[str] = "committed tokens"
    requires: ClassVar[Facts] = facts("committed")
    provides: ClassVar[Facts] = facts("guide_advanced")

    def run(self, graph: StepGraph) -> Changes:
        most = int(graph.values["target_tokens"].meta["val"].shape[1])
        state = [graph.state(name) for name in ("tokens", "length", "emitted", *_TABLES)]
        graph.insert(advance, graph.state("guide_state"), graph.values["slots"], *state, most=most)
        return Changes(1, f"up to {most} tokens")


@dataclass(frozen=True)
class CutDrafts(Pass):
    """A ready drafter knows nothing of guides: its proposals end in front of the first token that leads nowhere, so
    that the next step is no wider than it can be of use."""

    name: ClassVar[str] = "cut_drafts"
    looks_for: ClassVar[str] = "the proposals of a ready drafter"
    requires: ClassVar[Facts] = facts("guide_advanced", "proposed")
    provides: ClassVar[Facts] = facts("drafts_cut")

    def run(self, graph: StepGraph) -> Changes:
        state = [graph.state(name) for name in ("draft_tokens", "guide_state", *_TABLES)]
        graph.insert(cut, graph.state("draft_lens"), graph.values["slots"], *state)
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
    torch.ops.speccompile.advance_guide_(guide_state, slots, tokens, length, emitted, most, tables)


def cut(draft_lens: torch.Tensor, slots: torch.Tensor, *others: torch.Tensor) -> None:
    torch.ops.speccompile.cut_drafts_(draft_lens, slots, *others[:2], others[2:])

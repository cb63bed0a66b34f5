"""Draft tokens of a step that no forward computes: those of a ready drafter's state, or none."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import fx

from speccompile.graph.step_graph import StepGraph
from speccompile.passes.base import Changes, Facts, Pass, PassRegion, facts

#: State of the proposals of ready drafters: drafts ``[N, Kmax]`` and how many of them are valid, ``[N]``.
PROPOSED = ("draft_tokens", "draft_lens")


@dataclass(frozen=True)
class NoDrafts(Pass):
    """Plain decoding: K = 0."""

    name: ClassVar[str] = "no_drafts"
    named_values: ClassVar[tuple[str, ...]] = ("drafts", "row_draft_lens")
    looks_for: ClassVar[str] = "a step"
    region: ClassVar[PassRegion] = "draft"
    requires: ClassVar[Facts] = facts("rows")
    # No drafts are within every limit.
    provides: ClassVar[Facts] = facts("drafts", "drafts_limited")

    def run(self, graph: StepGraph) -> Changes:
        set_drafts(graph, *graph.insert(no_drafts, graph.values["slots"], before=graph.anchors.start))
        return Changes(1, "no draft tokens")


@dataclass(frozen=True)
class ReadDrafts(Pass):
    """Reads the first ``draft_len`` tokens that a ready drafter proposed at the end of the previous step, or those that
    a drafter's executable stored before this step.

    Args:
        state: names of the drafts and of their lengths.
    """

    draft_len: int
    state: tuple[str, str] = PROPOSED

    name: ClassVar[str] = "read_drafts"
    looks_for: ClassVar[str] = "drafts in the state"
    region: ClassVar[PassRegion] = "draft"
    requires: ClassVar[Facts] = facts("rows")
    provides: ClassVar[Facts] = facts("drafts")

    def run(self, graph: StepGraph) -> Changes:
        state = [graph.state(name) for name in (*self.state, "length", "limit")]
        drafts = graph.insert(
            proposed_drafts,
            *state,
            graph.values["slots"],
            before=graph.anchors.start,
            draft_len=self.draft_len,
        )
        set_drafts(graph, *drafts)
        return Changes(1, f"up to {self.draft_len} draft tokens from state")


@dataclass(frozen=True)
class LimitDrafts(Pass):
    """Limits the drafts of each row to its request's own limit."""

    name: ClassVar[str] = "limit_drafts"
    named_values: ClassVar[tuple[str, ...]] = ("drafts", "row_draft_lens")
    looks_for: ClassVar[str] = "drafts"
    region: ClassVar[PassRegion] = "draft"
    requires: ClassVar[Facts] = facts("rows", "drafts")
    provides: ClassVar[Facts] = facts("drafts_limited")

    def run(self, graph: StepGraph) -> Changes:
        drafts, lens = graph.values["drafts"], graph.values["row_draft_lens"]
        nodes = (drafts, lens, graph.state("draft_limit"), graph.values["slots"])
        limited = graph.insert(limited_drafts, *nodes, before=graph.anchors.start)
        drafts._rename("unlimited_drafts")
        lens._rename("unlimited_lens")
        set_drafts(graph, *limited)
        return Changes(1)


def limited_drafts(
    drafts: torch.Tensor, lens: torch.Tensor, draft_limit: torch.Tensor, slots: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Drafts ``[B, K]``, -1 after a request's own limit (``[N]``), and lengths ``[B]``."""
    lens = torch.minimum(lens, draft_limit[slots])
    offsets = torch.arange(drafts.shape[1], device=drafts.device)
    return torch.where(offsets < lens[:, None], drafts, -1), lens


def set_drafts(graph: StepGraph, drafts: fx.Node, draft_lens: fx.Node) -> None:
    """Name a step's draft tokens ``[B, K]``, -1 after a row's own, and how many each row has, ``[B]``."""
    graph.name_value("drafts", drafts)
    graph.name_value("row_draft_lens", draft_lens)


def no_drafts(slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Drafts ``[B, 0]`` and draft lengths ``[B]``, all 0."""
    return slots.new_zeros((slots.shape[0], 0)), torch.zeros_like(slots)


def useful_lens(lens: torch.Tensor, length: torch.Tensor, limit: torch.Tensor) -> torch.Tensor:
    """Draft lengths ``[B]`` less what could not be emitted: a step emits at most ``limit - length`` tokens."""
    return torch.minimum(lens, limit - length - 1).clamp(min=0)


def proposed_drafts(
    draft_tokens: torch.Tensor,
    draft_lens: torch.Tensor,
    length: torch.Tensor,
    limit: torch.Tensor,
    slots: torch.Tensor,
    *,
    draft_len: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Drafts ``[B, K]``, -1 after a row's own draft length, and those lengths ``[B]``."""
    lens = useful_lens(draft_lens[slots].clamp(max=draft_len), length[slots], limit[slots])
    drafts = draft_tokens[slots][:, :draft_len]
    offsets = torch.arange(draft_len, device=drafts.device)
    return torch.where(offsets < lens[:, None], drafts, -1), lens

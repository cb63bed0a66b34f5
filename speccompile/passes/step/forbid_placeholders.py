"""Drafts without tokens that stand for images."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from speccompile.graph.step_graph import StepGraph
from speccompile.passes.base import Changes, Facts, Pass, PassRegion, facts
from speccompile.passes.step.drafts import set_drafts


@dataclass(frozen=True)
class ForbidPlaceholders(Pass):
    """Ends the drafts of each row before the first of ``tokens``. A drafter that looks up earlier tokens would propose
    the placeholders of an image, and the target almost never chooses one."""

    tokens: tuple[int, ...]

    name: ClassVar[str] = "forbid_placeholders"
    named_values: ClassVar[tuple[str, ...]] = ("drafts", "row_draft_lens")
    looks_for: ClassVar[str] = "drafts"
    region: ClassVar[PassRegion] = "draft"
    requires: ClassVar[Facts] = facts("rows", "drafts")
    provides: ClassVar[Facts] = facts("placeholders_forbidden")

    def run(self, graph: StepGraph) -> Changes:
        drafts, lens = graph.values["drafts"], graph.values["row_draft_lens"]
        ended = graph.insert(before_tokens, drafts, lens, before=graph.anchors.start, tokens=self.tokens)
        drafts._rename("drafts_with_placeholders")
        lens._rename("lens_with_placeholders")
        set_drafts(graph, *ended)
        return Changes(1, f"{len(self.tokens)} tokens")


def before_tokens(
    drafts: torch.Tensor, lens: torch.Tensor, *, tokens: tuple[int, ...]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Drafts ``[B, K]``, -1 from the first of ``tokens`` on, and lengths ``[B]``."""
    found = torch.zeros_like(drafts, dtype=torch.bool)
    for token in tokens:
        found = found | (drafts == token)
    kept = found.cumsum(1) == 0
    return torch.where(kept, drafts, -1), torch.minimum(lens, kept.sum(1))

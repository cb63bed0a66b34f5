"""All ranks verify the drafts of the first one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

import speccompile.ops.collective  # noqa: F401  defines the ops
from speccompile.graph.step_graph import StepGraph
from speccompile.passes.base import Changes, Facts, Pass, PassRegion, facts

#: Values of a step that determine the verified drafts: tokens and lengths, and, of a tree, parents and depths.
VERIFIED = ("drafts", "row_draft_lens", "parents", "depths")


@dataclass(frozen=True)
class BroadcastDrafts(Pass):
    """Replaces the drafts of a network, its tree and how many there are, by those of the first rank, in one message.

    A network's drafts depend on sums of floating-point numbers. Other drafts on another rank would leave other KV
    there, although all ranks emit the same tokens.

    Args:
        group, ranks: of the collective.
    """

    group: str
    ranks: int

    name: ClassVar[str] = "broadcast_drafts"
    looks_for: ClassVar[str] = "drafts"
    region: ClassVar[PassRegion] = "draft"
    requires: ClassVar[Facts] = facts("drafts")
    provides: ClassVar[Facts] = facts("drafts_broadcast")

    def run(self, graph: StepGraph) -> Changes:
        names = [name for name in VERIFIED if name in graph.values]
        own = [graph.values[name] for name in names]
        shared = graph.insert(first_ranks, *own, before=graph.anchors.start, group=self.group, ranks=self.ranks)
        for name, before, after in zip(names, own, shared, strict=True):
            before._rename(f"own_{name}")
            graph.name_value(name, after)
        return Changes(len(names), f"{', '.join(names)} of the first rank")


def first_ranks(*values: torch.Tensor, group: str, ranks: int) -> tuple[torch.Tensor, ...]:
    """int64 ``[B]`` or ``[B, n]`` each, as the first rank has them."""
    columns = [value if value.ndim == 2 else value[:, None] for value in values]
    packed = torch.ops.speccompile.broadcast(torch.cat(columns, 1), group, ranks)
    parts = packed.split([column.shape[1] for column in columns], 1)
    return tuple(part if value.ndim == 2 else part[:, 0] for part, value in zip(parts, values, strict=True))

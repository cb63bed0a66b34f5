"""The first draft, chosen when a step ends, with its probability. A policy can read the probability before the next
step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from speccompile.graph.splicing import splice_graph
from speccompile.graph.state import N, StateSpec
from speccompile.graph.step_graph import StepGraph
from speccompile.modes.network.head_passes import FIRST_DRAFT, newest_rows
from speccompile.modes.network.passes import drafter_of, forward_drafter
from speccompile.passes.base import Changes, Facts, Pass, PassRegion, facts

#: State ``[N]``: the head's probability of each first draft, which policies learn from.
CONFIDENCE = "draft_confidence"


def first_draft_state() -> list[StateSpec]:
    """State tensors ``[N]``: each slot's first draft, and the head's probability of it."""
    return [StateSpec(FIRST_DRAFT, (N,), torch.int64, high=2), StateSpec(CONFIDENCE, (N,), torch.float32)]


@dataclass(frozen=True)
class DraftFirst(Pass):
    """Store the head's likeliest token at each sequence's newest row, and its probability.

    A later step that drafts reads the stored token, so it does not compute these logits again.
    """

    name: ClassVar[str] = "draft_first"
    looks_for: ClassVar[str] = "what the head left at the newest row"
    region: ClassVar[PassRegion] = "propose"
    requires: ClassVar[Facts] = facts("drafter_read")
    provides: ClassVar[Facts] = facts("drafted_first")

    def run(self, graph: StepGraph) -> Changes:
        head, end = drafter_of(graph), graph.output
        slots = graph.values.get("target_slots", graph.values["slots"])
        column = graph.insert(as_column, slots)
        # The output of the layers is given, so the values of token and position are not read.
        given = {"hidden": newest_rows(graph, slots, end)}
        (logits,) = forward_drafter(graph, column, column, slots, before=end, given=given)
        ids = []
        if "target_ids" in head.values:
            ids = splice_graph(graph, head, {}, [head.values["target_ids"]], end)
        graph.insert(store_first, graph.state(FIRST_DRAFT), graph.state(CONFIDENCE), slots, logits, *ids)
        return Changes(1)


def as_column(slots: torch.Tensor) -> torch.Tensor:
    return slots[:, None]


def store_first(
    first_draft: torch.Tensor,
    confidence: torch.Tensor,
    slots: torch.Tensor,
    logits: torch.Tensor,
    ids: torch.Tensor | None = None,
) -> None:
    """Write the likeliest token of ``logits`` ``[B, 1, Vd]`` and its probability to the rows' slots.

    Args:
        first_draft, confidence: ``[N]``.
        slots: ``[B]``.
        ids: the target's ids ``[Vd]``, if the head has its own vocabulary.
    """
    best, token = logits[:, 0].float().log_softmax(-1).max(-1)
    first_draft.index_put_((slots,), token if ids is None else ids[token])
    confidence.index_put_((slots,), best.exp())

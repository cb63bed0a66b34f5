"""Drafting of a chain in segments. Each tier has one executable, which continues the chain of the next smaller tier.

A segment stores its drafts, the chance of each, and the hidden state for the next forward in the arena. The host can
stop the chain after any segment, and run the tier that verifies this number of drafts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import fx

from speccompile.graph.state import K, N, StateSpec
from speccompile.graph.step_graph import StepGraph
from speccompile.modes.network.draft_first import CONFIDENCE
from speccompile.modes.network.head_passes import DraftByHead, newest_rows

#: State ``[N, H]``: the hidden state that the next segment's first forward reads.
CARRIED = "draft_carried"
#: State ``[N, K]``: for each draft, the head's probability that it and all drafts before it are right.
CHANCES = "draft_chances"


def segment_state(hidden_size: int, dtype: torch.dtype) -> list[StateSpec]:
    return [StateSpec(CARRIED, (N, hidden_size), dtype), StateSpec(CHANCES, (N, K), torch.float32)]


@dataclass(frozen=True)
class DraftSegment(DraftByHead):
    """Draft the tokens ``begin`` .. ``draft_len - 1`` of a chain, and store their chances.

    A chance is the product of the head's greatest probabilities, also if the drafts are drawn. It does not depend on
    the chosen tokens.
    """

    name: ClassVar[str] = "draft_segment"

    def carried_before(self, graph: StepGraph) -> list[fx.Node]:
        if not self.begin:
            return []
        return [newest_rows(graph, graph.values["slots"], graph.anchors.start, CARRIED)]

    def after_forward(self, graph: StepGraph, logits: fx.Node, carry: fx.Node, place: int) -> None:
        slots, chances, start = graph.values["slots"], graph.state(CHANCES), graph.anchors.start
        if place == 0:
            # The previous step has computed the first draft's chance. Its logits are not always computed again.
            graph.insert(store_first_chance, chances, slots, graph.state(CONFIDENCE), before=start)
        else:
            graph.insert(store_chance, chances, slots, logits, before=start, place=place)
        if place == self.draft_len - 1:
            graph.insert(store_carried, graph.state(CARRIED), slots, carry, before=start)


def store_first_chance(chances: torch.Tensor, slots: torch.Tensor, confidence: torch.Tensor) -> None:
    """Write the first drafts' probabilities ``[N]`` of the rows to ``chances`` ``[N, K]``."""
    chances.index_put_((slots, torch.zeros_like(slots)), confidence[slots])


def store_chance(chances: torch.Tensor, slots: torch.Tensor, logits: torch.Tensor, *, place: int) -> None:
    """Write the chance of draft number ``place`` to ``chances`` ``[N, K]``.

    It is the greatest probability of ``logits`` ``[B, 1, V]``, times the chance of the draft before.
    """
    best = logits[:, 0].float().log_softmax(-1).amax(-1).exp()
    chances.index_put_((slots, torch.full_like(slots, place)), chances[slots, place - 1] * best)


def store_carried(carried: torch.Tensor, slots: torch.Tensor, carry: torch.Tensor) -> None:
    """Write ``carry`` ``[B, 1, H]`` to the rows' slots in ``carried`` ``[N, H]``."""
    carried.index_put_((slots,), carry[:, 0])

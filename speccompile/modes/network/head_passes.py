"""A head that reads its own output (EAGLE-3, one MTP module) in a step: keeping it warm, and drafting.

Row i of the head belongs to position i: it reads the target's hidden states at i and the token at i + 1, and its KV
lies at place i. Of a sequence of L tokens the target has read L - 1, so the rows 0 .. L - 2 can be computed. The last
one predicts the token at L: drafting starts from it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import fx

from speccompile.graph.splicing import PREFIX, splice_graph
from speccompile.graph.step_graph import StepGraph
from speccompile.modes.network.draft_windows import widened
from speccompile.modes.network.head_network import NEWEST_ROW
from speccompile.modes.network.passes import DraftByNetwork, drafter_of, forward_drafter
from speccompile.passes.base import Changes, Facts, Pass, PassRegion, facts
from speccompile.passes.step.draft_chain import Forward

NEWEST = f"{PREFIX}{NEWEST_ROW}"
#: State ``[N]`` of :class:`~speccompile.modes.network.draft_first.DraftFirst`.
FIRST_DRAFT = "first_draft"


@dataclass(frozen=True)
class KeepHeadWarm(Pass):
    """The head reads the rows that the target has read, whose next tokens are known after the commit. The output of its
    layers at each sequence's newest row is stored.

    KV of rejected drafts stays after the end of the sequence; the next step overwrites it before any query attends to
    it. This does not depend on the tier, so tiers can follow one another in any order.
    """

    name: ClassVar[str] = "keep_head_warm"
    looks_for: ClassVar[str] = "what the target reads"
    region: ClassVar[PassRegion] = "propose"
    requires: ClassVar[Facts] = facts("target_inputs", "committed", "tapped")
    provides: ClassVar[Facts] = facts("drafter_read")

    def run(self, graph: StepGraph) -> Changes:
        values = graph.values
        slots, positions = values.get("target_slots", values["slots"]), values["positions"]
        tokens = graph.insert(tokens_after, graph.state("tokens"), slots, positions)
        (hidden,) = forward_drafter(
            graph,
            tokens,
            positions,
            slots,
            before=graph.output,
            outputs=("hidden",),
            given={"hidden_states": values["tapped"]},
        )
        nodes = (graph.state(NEWEST), graph.state("length"), slots, positions, hidden)
        graph.insert(store_newest, *nodes, dummy_slot=graph.layout.dummy_slot)
        return Changes(1, f"the head reads {list(tokens.meta['val'].shape)}")


def tokens_after(tokens: torch.Tensor, slots: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """The token after each position, ``[B, T]``; an arbitrary one after the end of the sequence.

    Args:
        tokens: ``[N, S]``; slots: ``[B]``; positions: ``[B, T]``.
    """
    return tokens[slots[:, None], (positions + 1).clamp(max=tokens.shape[1] - 1)]


def store_newest(
    newest: torch.Tensor,
    length: torch.Tensor,
    slots: torch.Tensor,
    positions: torch.Tensor,
    hidden: torch.Tensor,
    *,
    dummy_slot: int,
) -> None:
    """Write ``hidden`` ``[B, T, H]`` at the position ``length - 2`` into ``newest`` ``[N, H]``.

    Of several rows of one slot (a prompt that is read along) at most one has that position. The others write to the
    dummy slot.
    """
    at = length[slots] - 2 - positions[:, 0]
    inside = (at >= 0) & (at < hidden.shape[1])
    rows = torch.arange(hidden.shape[0], device=hidden.device)
    found = hidden[rows, at.clamp(0, hidden.shape[1] - 1)]
    newest.index_put_((torch.where(inside, slots, dummy_slot),), found)


@dataclass(frozen=True)
class DraftByHead(DraftByNetwork):
    """The first draft comes from the stored output of the newest row. Each further one comes from a forward of one row,
    which reads the previous draft and the head's own output there.

    Args:
        first_stored: the step before has chosen the first draft.
    """

    first_stored: bool = False

    name: ClassVar[str] = "draft_by_head"
    looks_for: ClassVar[str] = "the mode's head"

    def forward(self, graph: StepGraph) -> Forward:
        head, slots, start = drafter_of(graph), graph.values["slots"], graph.anchors.start
        outputs = outputs_of(head, draws=self.draws)
        # The head's projection of the target's hidden states, or these themselves.
        reads = "fused" if "fused" in head.values else "hidden_states"
        carried = self.carried_before(graph)

        def forward(token: fx.Node, position: fx.Node, place: int) -> fx.Node:
            # A token belongs to the row before its own position.
            row = graph.insert(previous_position, position, before=start)
            if place == 0:
                given = {"hidden": graph.insert(gather_rows, graph.state(NEWEST), slots, before=start)}
            else:
                given = {reads: carried[-1]}
            logits, carry = forward_drafter(
                graph, token, row, slots, before=start, outputs=outputs, given=given, drafter=widened(head, place)
            )
            carried.append(carry)
            self.after_forward(graph, logits, carry, place)
            return logits

        return forward

    def carried_before(self, graph: StepGraph) -> list[fx.Node]:
        """What the forward before this executable's first one left for the next, ``[B, 1, H]``; empty at the first
        draft."""
        return []

    def after_forward(self, graph: StepGraph, logits: fx.Node, carry: fx.Node, place: int) -> None:
        """Insert what reads the results of the forward at ``place``."""

    def first_draft(self, graph: StepGraph) -> fx.Node | None:
        if not self.first_stored:
            return None
        state = graph.state(FIRST_DRAFT)
        return graph.insert(of_rows_as_column, state, graph.values["slots"], before=graph.anchors.start)

    def token_ids(self, graph: StepGraph) -> fx.Node | None:
        return target_ids_of(graph, draws=self.draws)

    def what(self, graph: StepGraph) -> str:
        return f"{self.draft_len - 1} forwards of {len(drafter_of(graph).anchors.layers)} layers"


def outputs_of(head: StepGraph, *, draws: bool) -> Sequence[str]:
    """Names of the logits and of the hidden state for the next forward."""
    whole = "target_logits" in head.values and not chooses_in_part(head, draws=draws)
    return "target_logits" if whole else "logits", "carried" if "carried" in head.values else "hidden"


def chooses_in_part(head: StepGraph, *, draws: bool) -> bool:
    """Whether the argmax is over the head's own vocabulary. Noise needs that of the target."""
    return not draws and "target_ids" in head.values


def target_ids_of(graph: StepGraph, *, draws: bool) -> fx.Node | None:
    """The target's ids ``[Vd]`` of the head's own vocabulary; None where all of the target's is chosen from."""
    head = drafter_of(graph)
    if not chooses_in_part(head, draws=draws):
        return None
    (ids,) = splice_graph(graph, head, {}, [head.values["target_ids"]], graph.anchors.start)
    return ids


def previous_position(position: torch.Tensor) -> torch.Tensor:
    """The position before, and 0 at the beginning."""
    return (position - 1).clamp(min=0)


def of_rows_as_column(stored: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """``[N]`` of the rows' slots, ``[B, 1]``."""
    return stored[slots][:, None]


def gather_rows(newest: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """``newest`` ``[N, H]`` of the rows' slots, ``[B, 1, H]``."""
    return newest[slots][:, None]

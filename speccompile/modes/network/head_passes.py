"""Passes of a head that reads its own output (EAGLE-3, one MTP module): updating its state, and drafting.

Row i of the head reads the target's hidden states at position i and the token at position i + 1. Its KV is stored at
position i. The target has read L - 1 tokens of a sequence of L tokens, so the rows 0 .. L - 2 can be computed. The last
of them predicts the token at position L: drafting starts from it.
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
from speccompile.modes.network.passes import DraftByNetwork, drafter_of, forward_drafter, note_read
from speccompile.ops.draft_rows import form_of, rows_of, store_newest_, tokens_after
from speccompile.passes.base import Changes, Facts, Pass, PassRegion, facts
from speccompile.passes.step.draft_chain import Forward

NEWEST = f"{PREFIX}{NEWEST_ROW}"
#: State ``[N]`` of :class:`~speccompile.modes.network.draft_first.DraftFirst`.
FIRST_DRAFT = "first_draft"


@dataclass(frozen=True)
class KeepHeadWarm(Pass):
    """Compute the head's rows for the positions that the target has read. Their next tokens are known after the commit.

    The output of the head's layers at each sequence's newest row is stored. KV of rejected drafts stays after the end
    of the sequence; the next step overwrites it before any query attends to it. This does not depend on the tier, so
    tiers can follow one another in any order.

    Args:
        notes_read: count the rows as read, for :class:`~speccompile.modes.network.catch_up.CatchUp`.
    """

    notes_read: bool = False

    name: ClassVar[str] = "keep_head_warm"
    looks_for: ClassVar[str] = "what the target reads"
    region: ClassVar[PassRegion] = "propose"
    requires: ClassVar[Facts] = facts("target_inputs", "committed", "tapped")
    provides: ClassVar[Facts] = facts("drafter_read")

    def run(self, graph: StepGraph) -> Changes:
        values = graph.values
        slots, positions = values.get("target_slots", values["slots"]), values["positions"]
        tokens = graph.insert(form_of(tokens_after, graph.facts), graph.state("tokens"), slots, positions)
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
        graph.insert(form_of(store_newest_, graph.facts), *nodes, dummy_slot=graph.layout.dummy_slot)
        if self.notes_read:
            note_read(graph, tokens.meta["val"].shape[1], before=graph.output)
        return Changes(1, f"the head reads {list(tokens.meta['val'].shape)}")


@dataclass(frozen=True)
class DraftByHead(DraftByNetwork):
    """Draft a chain. The first draft comes from the stored output of the newest row. Each further draft comes from a
    forward of one row, which reads the previous draft and the head's own output there.

    Args:
        first_stored: the previous step has chosen the first draft.
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
            if place == 0:
                given = {"hidden": newest_rows(graph, slots, start)}
            else:
                given = {reads: carried[-1]}
            # A token is read in the row of the position before its own.
            logits, carry = forward_drafter(
                graph,
                token,
                position,
                slots,
                before=start,
                outputs=outputs,
                given=given,
                drafter=widened(head, place),
                back=1,
            )
            carried.append(carry)
            self.after_forward(graph, logits, carry, place)
            return logits

        return forward

    def carried_before(self, graph: StepGraph) -> list[fx.Node]:
        """The hidden state ``[B, 1, H]`` that a previous executable stored for this one's first forward; empty if this
        executable drafts the first token."""
        return []

    def after_forward(self, graph: StepGraph, logits: fx.Node, carry: fx.Node, place: int) -> None:
        """Insert ops that read the results of the forward for draft number ``place``. By default there are no such
        ops."""

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
    """The names of the head's logits, and of its hidden state for the next forward."""
    whole = "target_logits" in head.values and not chooses_in_part(head, draws=draws)
    return "target_logits" if whole else "logits", "carried" if "carried" in head.values else "hidden"


def chooses_in_part(head: StepGraph, *, draws: bool) -> bool:
    """Whether drafts are chosen from the head's own vocabulary. Drawing needs the target's vocabulary, since the noise
    is that of the target's tokens."""
    return not draws and "target_ids" in head.values


def target_ids_of(graph: StepGraph, *, draws: bool) -> fx.Node | None:
    """The target's ids ``[Vd]`` of the head's own vocabulary; None if drafts are chosen from the target's
    vocabulary."""
    head = drafter_of(graph)
    if not chooses_in_part(head, draws=draws):
        return None
    (ids,) = splice_graph(graph, head, {}, [head.values["target_ids"]], graph.anchors.start)
    return ids


def of_rows_as_column(stored: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """The entries ``[B, 1]`` of ``stored`` ``[N]`` for the rows' slots."""
    return stored[slots][:, None]


def newest_rows(graph: StepGraph, slots: fx.Node, before: fx.Node, state: str = NEWEST) -> fx.Node:
    """The entries ``[B, 1, H]`` of ``state`` ``[N, H]`` for the rows' ``slots``."""
    found = graph.insert(form_of(rows_of, graph.facts), graph.state(state), slots, before=before)
    row: fx.Node = graph.insert(as_one_place, found, before=before)
    return row


def as_one_place(rows: torch.Tensor) -> torch.Tensor:
    """``[B, 1, H]`` of ``[B, H]``."""
    return rows[:, None]

"""An EAGLE-3 head in a step: how it stays warm, and how it drafts.

Row i of the head belongs to position i: it reads the target's hidden states at i and the token at i + 1, and its KV
lies at place i. So of a text of L tokens, of which the target has read L - 1, the rows 0 .. L - 2 can be computed; the
last of them says which token comes at L, and drafting goes on from there.
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
from speccompile.modes.network.passes import DraftByNetwork, drafter_of, forward_drafter
from speccompile.passes.base import Changes, Facts, Pass, facts
from speccompile.passes.step.draft_chain import Forward

NEWEST = f"{PREFIX}newest"


@dataclass(frozen=True)
class KeepHeadWarm(Pass):
    """The head reads the rows that the target has read, now that the token behind each is known, and what its layers
    leave at each text's newest row is kept.

    Of rejected drafts it leaves KV behind the text, which the next rows overwrite before anyone looks. Nothing of it
    depends on the tier, so any tier can follow any other.
    """

    name: ClassVar[str] = "keep_head_warm"
    looks_for: ClassVar[str] = "what the target reads"
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
        graph.insert(keep_newest, *nodes, dummy_slot=graph.layout.dummy_slot)
        return Changes(1, f"the head reads {list(tokens.meta['val'].shape)}")


def tokens_after(tokens: torch.Tensor, slots: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """The token behind each position, ``[B, T]``; behind the text, any.

    Args:
        tokens: ``[N, S]``; slots: ``[B]``; positions: ``[B, T]``.
    """
    return tokens[slots[:, None], (positions + 1).clamp(max=tokens.shape[1] - 1)]


def keep_newest(
    newest: torch.Tensor,
    length: torch.Tensor,
    slots: torch.Tensor,
    positions: torch.Tensor,
    hidden: torch.Tensor,
    *,
    dummy_slot: int,
) -> None:
    """Keep in ``newest`` ``[N, H]`` what ``hidden`` ``[B, T, H]`` has of the position ``length - 2``, of the rows that
    have it: of several rows of one slot (a prompt beside a step) at most one, and the others write to nobody's."""
    at = length[slots] - 2 - positions[:, 0]
    inside = (at >= 0) & (at < hidden.shape[1])
    rows = torch.arange(hidden.shape[0], device=hidden.device)
    found = hidden[rows, at.clamp(0, hidden.shape[1] - 1)]
    newest.index_put_((torch.where(inside, slots, dummy_slot),), found)


@dataclass(frozen=True)
class DraftByHead(DraftByNetwork):
    """The first draft comes from what is kept of the newest row, each further one from a forward of one row, which
    reads the draft in front of it and what the head itself left there."""

    name: ClassVar[str] = "draft_by_head"
    looks_for: ClassVar[str] = "the mode's head"

    def forward(self, graph: StepGraph) -> Forward:
        head, slots, start = drafter_of(graph), graph.values["slots"], graph.anchors.start
        outputs = self._outputs(head)
        # What a head makes of the target's hidden states, or these themselves.
        reads = "fused" if "fused" in head.values else "hidden_states"
        carried: list[fx.Node] = []

        def forward(token: fx.Node, position: fx.Node, place: int) -> fx.Node:
            # The row that has this token is the one in front of the token's place.
            row = graph.insert(in_front, position, before=start)
            if place == 0:
                given = {"hidden": graph.insert(of_rows, graph.state(NEWEST), slots, before=start)}
            else:
                given = {reads: carried[-1]}
            logits, carry = forward_drafter(
                graph, token, row, slots, before=start, outputs=outputs, given=given, drafter=widened(head, place)
            )
            carried.append(carry)
            return logits

        return forward

    def token_ids(self, graph: StepGraph) -> fx.Node | None:
        head = drafter_of(graph)
        if not self._chooses_in_part(head):
            return None
        (ids,) = splice_graph(graph, head, {}, [head.values["target_ids"]], graph.anchors.start)
        return ids

    def _chooses_in_part(self, head: StepGraph) -> bool:
        """The greatest is looked for among the head's own tokens; noise is that of the target's."""
        return not self.draws and "target_ids" in head.values

    def _outputs(self, head: StepGraph) -> Sequence[str]:
        """Names of the logits, and of what is carried on."""
        whole = "target_logits" in head.values and not self._chooses_in_part(head)
        return "target_logits" if whole else "logits", "carried" if "carried" in head.values else "hidden"

    def what(self, graph: StepGraph) -> str:
        return f"{self.draft_len - 1} forwards of {len(drafter_of(graph).anchors.layers)} layers"


def in_front(position: torch.Tensor) -> torch.Tensor:
    return (position - 1).clamp(min=0)


def of_rows(newest: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """``[N, H]`` of the rows' slots, ``[B, 1, H]``."""
    return newest[slots][:, None]

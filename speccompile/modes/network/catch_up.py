"""Drafters that read what the target has read only when they draft.

Drafting begins with the rows that the drafter has not computed yet. Steps without its drafts therefore cost no forward
of the drafter. A further executable computes these rows if they become too many, before a mixed step, and when a
request ends: its KV may be reused. For a head, a decode step stores the hidden states that the head will read.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from speccompile.graph.state import N, StateSpec
from speccompile.graph.step_graph import StepGraph
from speccompile.modes.network.head_passes import NEWEST
from speccompile.modes.network.passes import READ_LEN, forward_drafter, forward_model, note_read
from speccompile.ops.draft_rows import form_of, store_newest_
from speccompile.ops.unread_rows import keep_unread_, unread_rows, unread_tokens
from speccompile.passes.base import Changes, Facts, Pass, PassRegion, facts

#: State ``[N, P, M]``: hidden states of the target at the newest P positions of each sequence.
UNREAD = "unread_hidden"
#: Least P. It is at least twice the number of tokens that a step commits: the rows that the drafter has not computed,
#: and those that the next step adds.
UNREAD_TOKENS = 32


def most_unread(deepest: int) -> int:
    """P, if a step accepts at most ``deepest`` drafts."""
    return max(UNREAD_TOKENS, 2 * (deepest + 1))


def read_state() -> list[StateSpec]:
    """State of drafters that catch up."""
    return [StateSpec(READ_LEN, (N,), torch.int64)]


def unread_state(tokens: int, hidden_size: int, dtype: torch.dtype) -> list[StateSpec]:
    """State of heads that catch up. ``tokens``: P; ``hidden_size``: M."""
    return [StateSpec(UNREAD, (N, tokens, hidden_size), dtype), *read_state()]


@dataclass(frozen=True)
class KeepUnread(Pass):
    """Store the target's hidden states at the positions of a decode step, for :class:`CatchUpHead`.

    Entries of rejected drafts are replaced by the next step before the head reads them.
    """

    name: ClassVar[str] = "keep_unread"
    looks_for: ClassVar[str] = "what the target reads"
    region: ClassVar[PassRegion] = "propose"
    requires: ClassVar[Facts] = facts("committed", "tapped")
    provides: ClassVar[Facts] = facts("drafter_read")

    def run(self, graph: StepGraph) -> Changes:
        slots, positions, tapped = (graph.values[name] for name in ("slots", "positions", "tapped"))
        graph.insert(form_of(keep_unread_, graph.facts), graph.state(UNREAD), slots, positions, tapped)
        return Changes(1, f"{list(tapped.meta['val'].shape)} are kept for the head")


@dataclass(frozen=True)
class CatchUp(Pass):
    """Compute the drafter's next rows, before it drafts.

    Args:
        width: the number of rows. Those after the newest one are not read by any query before they are computed again.
    """

    width: int

    looks_for: ClassVar[str] = "the mode's network"
    region: ClassVar[PassRegion] = "draft"
    requires: ClassVar[Facts] = facts("rows")
    provides: ClassVar[Facts] = facts("drafter_read")


@dataclass(frozen=True)
class CatchUpModel(CatchUp):
    """Run a draft model over the tokens that it has not read. Drafting reads the newest one."""

    name: ClassVar[str] = "catch_up_model"

    def run(self, graph: StepGraph) -> Changes:
        slots, start = graph.values["slots"], graph.anchors.start
        state = [graph.state(name) for name in (READ_LEN, "tokens")]
        function = form_of(unread_tokens, graph.facts)
        tokens, positions = graph.insert(function, *state, slots, before=start, width=self.width)
        forward_model(graph, tokens, positions, slots, before=start, output="kv")
        note_read(graph, self.width, before=start)
        return Changes(1, f"the drafter reads {list(tokens.meta['val'].shape)}")


@dataclass(frozen=True)
class CatchUpHead(CatchUp):
    """Run a head over the rows that it has not computed. The output of its layers at the newest row is stored."""

    name: ClassVar[str] = "catch_up_head"

    def run(self, graph: StepGraph) -> Changes:
        slots, start = graph.values["slots"], graph.anchors.start
        state = [graph.state(name) for name in (UNREAD, READ_LEN, "tokens")]
        function = form_of(unread_rows, graph.facts)
        tokens, positions, unread = graph.insert(function, *state, slots, before=start, width=self.width)
        given, outputs = {"hidden_states": unread}, ("hidden",)
        (hidden,) = forward_drafter(graph, tokens, positions, slots, before=start, outputs=outputs, given=given)
        newest_of = (graph.state(NEWEST), graph.state("length"), slots, positions, hidden)
        dummy = graph.layout.dummy_slot
        graph.insert(form_of(store_newest_, graph.facts), *newest_of, before=start, dummy_slot=dummy)
        note_read(graph, self.width, before=start)
        return Changes(1, f"the head reads {list(tokens.meta['val'].shape)}")

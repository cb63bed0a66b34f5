"""Hidden states are kept for every position, as KV is: to be saved when a text has ended."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from speccompile.errors import AnchorError
from speccompile.graph.step_graph import StepGraph
from speccompile.passes.base import Changes, Facts, Pass, PassRegion, facts
from speccompile.passes.step.tap_hidden import MarkTaps, take_marks


@dataclass(frozen=True)
class MarkSaved(MarkTaps):
    """Names the hidden states that are saved, as :class:`MarkTaps` those of a drafter. It runs before the passes that
    remove rows from the lm_head, or the lm_head from the step."""

    name: ClassVar[str] = "mark_saved"
    prefix: ClassVar[str] = "saved"
    provides: ClassVar[Facts] = facts("saved_marked")


@dataclass(frozen=True)
class SaveHidden(Pass):
    """Writes the marked hidden states to the state tensor ``state``, ``[N, S, taps * M]``, at the positions that the
    target reads.

    The target reads a position again as long as it is not committed. Hidden states of committed positions are therefore
    those of the final sequence: the row of the token that replaces a rejected draft overwrites the draft's row.
    """

    state: str

    name: ClassVar[str] = "save_hidden"
    looks_for: ClassVar[str] = "marked hidden states"
    region: ClassVar[PassRegion] = "other"
    requires: ClassVar[Facts] = facts("saved_marked", "target_inputs")
    provides: ClassVar[Facts] = facts("hidden_saved")
    invalidates: ClassVar[Facts] = facts("saved_marked")

    def run(self, graph: StepGraph) -> Changes:
        values, marked = graph.values, take_marks(graph, MarkSaved.prefix)
        state = graph.state(self.state)
        size = state.meta["val"].shape[-1] // max(1, len(marked))
        for node in marked:
            shape = tuple(node.meta["val"].shape)
            if len(shape) != 3 or shape[-1] != size:
                reason = f"it has the shape {shape}, and [B, T, {size}] can be saved"
                raise AnchorError(anchor=f"the hidden state {node.name}", reason=reason)
        slots = values.get("target_slots", values["slots"])
        graph.insert(write_rows, state, slots, values["positions"], *marked)
        return Changes(len(marked), f"{len(marked)} hidden states of every position")


def write_rows(saved: torch.Tensor, slots: torch.Tensor, positions: torch.Tensor, *hidden: torch.Tensor) -> None:
    """Write ``hidden``, ``[B, T, M]`` each, side by side into ``saved`` ``[N, S, taps * M]``.

    Args:
        slots: ``[B]``; positions: ``[B, T]``.
    """
    saved.index_put_((slots[:, None], positions), torch.cat(hidden, dim=-1).to(saved.dtype))

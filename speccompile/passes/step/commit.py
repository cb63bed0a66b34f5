"""Commit: accepted tokens become part of the sequence, which is cut off inside the graph."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from speccompile.graph.step_graph import StepGraph
from speccompile.passes.base import Changes, Facts, Pass, PassRegion, facts
from speccompile.passes.step.tap_hidden import marked

_STATE = ("tokens", "length", "limit", "alive", "eos", "emitted", "accepted", "proposed")


@dataclass(frozen=True)
class Commit(Pass):
    """Append the emitted tokens, advance ``length``, and output nothing. Rows end at EOS, at their limit, or where no
    token could be chosen without any draft.

    After this pass the results of the step are only in the arena. A row that is not alive changes no live state. One op
    commits (:mod:`speccompile.ops.commit`). With the fact ``agreement`` (drafts that equal the target's tokens are
    accepted) it also counts these drafts.
    """

    name: ClassVar[str] = "commit"
    looks_for: ClassVar[str] = "accepted tokens"
    region: ClassVar[PassRegion] = "commit"
    requires: ClassVar[Facts] = facts("accepted")
    provides: ClassVar[Facts] = facts("committed")

    def run(self, graph: StepGraph) -> Changes:
        state = [graph.state(name) for name in _STATE]
        ready = [graph.values["ready"]] if "ready" in graph.values else []
        counted = "agreement" not in graph.facts
        names = ("slots", "target_tokens", "row_draft_lens", "row_accepted" if counted else "drafts")
        graph.insert(accept_commit, *state, *[graph.values[name] for name in names], *ready, counted=counted)
        graph.set_outputs()
        # The count that the op computes itself is not needed before it.
        graph.remove_dead_code(keep=marked(graph))
        return Changes(1)


def accept_commit(*tensors: torch.Tensor, counted: bool) -> None:
    """Call the op. ``tensors`` are those of :func:`speccompile.ops.commit.commit` up to ``target_tokens``, then
    row_draft_lens, then row_accepted if it is ``counted``, else the drafts, then ready if there is one."""
    (*state, judged), ready = tensors[:12], tensors[12:]
    accepted, drafts = (judged, None) if counted else (None, judged)
    torch.ops.speccompile.accept_commit_(*state, accepted, drafts, *ready)

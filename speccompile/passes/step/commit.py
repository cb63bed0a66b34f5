"""Commit: what was accepted becomes part of the text, cut off inside the graph."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from speccompile.graph.step_graph import StepGraph
from speccompile.ops.commit import commit
from speccompile.passes.base import Changes, Facts, Pass, PassRegion, facts
from speccompile.passes.native.step_ops import uses_step_ops
from speccompile.passes.step.tap_hidden import marked

_STATE = ("tokens", "length", "limit", "alive", "eos", "emitted", "accepted", "proposed")


@dataclass(frozen=True)
class Commit(Pass):
    """Appends the emitted tokens, advances ``length``, outputs nothing. Rows end at EOS, at their limit, or where no
    token could be chosen without any draft.

    From here on the step's results are in the arena alone. A row that is not alive changes no live state.
    The fact ``agreement`` says that drafts are accepted that equal the target's tokens: where there are step
    ops, one of them counts those and commits.
    """

    name: ClassVar[str] = "commit"
    looks_for: ClassVar[str] = "accepted tokens"
    region: ClassVar[PassRegion] = "commit"
    requires: ClassVar[Facts] = facts("accepted")
    provides: ClassVar[Facts] = facts("committed")

    def run(self, graph: StepGraph) -> Changes:
        state = [graph.state(name) for name in _STATE]
        ready = [graph.values["ready"]] if "ready" in graph.values else []
        if uses_step_ops(graph):
            counted = "agreement" not in graph.facts
            names = ("slots", "target_tokens", "row_draft_lens", "row_accepted" if counted else "drafts")
            graph.insert(accept_commit, *state, *[graph.values[name] for name in names], *ready, counted=counted)
        else:
            values = [graph.values[name] for name in ("slots", "target_tokens", "row_accepted", "row_draft_lens")]
            graph.insert(commit, *state, *values, *ready)
        graph.set_outputs()
        if uses_step_ops(graph):
            # What the op counts itself need not be counted before.
            graph.remove_dead_code(keep=marked(graph))
        return Changes(1)


def accept_commit(*tensors: torch.Tensor, counted: bool) -> None:
    """The same as one op. ``tensors`` are those of :func:`commit` up to ``target_tokens``, then row_draft_lens, then
    row_accepted if it is ``counted``, else the drafts, then ready if there is one."""
    (*state, judged), ready = tensors[:12], tensors[12:]
    accepted, drafts = (judged, None) if counted else (None, judged)
    torch.ops.speccompile.accept_commit_(*state, accepted, drafts, *ready)

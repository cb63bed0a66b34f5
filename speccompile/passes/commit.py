"""Commit: what was accepted becomes part of the text, cut off inside the graph."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from speccompile.graph_capture.graph import StepGraph
from speccompile.passes.base import Changes, Facts, Pass, facts
from speccompile.passes.step_ops import uses_step_ops
from speccompile.passes.tap_hidden import marked

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


def commit(
    tokens: torch.Tensor,
    length: torch.Tensor,
    limit: torch.Tensor,
    alive: torch.Tensor,
    eos: torch.Tensor,
    emitted: torch.Tensor,
    accepted: torch.Tensor,
    proposed: torch.Tensor,
    slots: torch.Tensor,
    target_tokens: torch.Tensor,
    row_accepted: torch.Tensor,
    row_draft_lens: torch.Tensor,
    ready: torch.Tensor | None = None,
) -> None:
    """Write a step's outcome into the state of its rows' slots.

    Args:
        tokens ``[N, S]``, length, limit, alive ``[N]``, eos ``[N, E]``, emitted, accepted, proposed ``[N]``: state.
        slots: ``[B]``; target_tokens: ``[B, K+1]``, -1 where there is none; row_accepted, row_draft_lens: ``[B]``.
        ready: ``[B]``, False for rows that emit nothing yet (a prompt's chunk that is not its last).
    """
    row_length, row_alive = length[slots], alive[slots]
    acts = row_alive if ready is None else row_alive & ready
    width = target_tokens.shape[1]
    offsets = torch.arange(width, device=tokens.device)

    count = torch.minimum(row_accepted + 1, limit[slots] - row_length)
    is_eos = (target_tokens[:, :, None] == eos[slots][:, None, :]).any(-1) & (offsets < count[:, None])
    first_eos = torch.where(is_eos, offsets, width).amin(1)
    count = torch.minimum(count, first_eos + 1)
    first_undecided = torch.where(target_tokens < 0, offsets, width).amin(1)
    # A draft that is not a number spoils the places in front of it too: without drafts they may be sound.
    undecided = (first_undecided < count) & (row_draft_lens == 0)
    count = torch.where(acts, torch.minimum(count, first_undecided), 0)

    places = row_length[:, None] + offsets
    old = tokens[slots[:, None], places]
    new = torch.where(offsets < count[:, None], target_tokens, old)
    tokens.index_put_((slots[:, None], places), new)

    new_length = row_length + count
    ended = acts & ((first_eos < count) | (new_length >= limit[slots]) | undecided)
    length.index_put_((slots,), new_length)
    alive.index_put_((slots,), row_alive & ~ended)
    emitted.index_put_((slots,), count)
    accepted.index_put_((slots,), torch.minimum(row_accepted, count))
    proposed.index_put_((slots,), torch.where(acts, row_draft_lens, 0))

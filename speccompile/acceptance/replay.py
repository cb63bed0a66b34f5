"""Replay of a recorded trace of accepted counts, for ``forced``: a policy then receives the counts of a recorded
run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from speccompile.graph.state import K, N, StateSpec
from speccompile.graph.step_graph import StepGraph
from speccompile.passes.base import Changes, Facts, Pass, PassRegion, facts
from speccompile.utils.numbers import is_int

#: The largest number of steps of a trace. The state tensor has this size for every trace: no size of a step depends on
#: it.
CAPACITY = 4096

STATE = ("forced_trace", "forced_steps")


def trace_problem(trace: object) -> str | None:
    """The reason why ``trace`` is not a valid trace; None if it is."""
    if not isinstance(trace, list | tuple) or not trace:
        return "it must be a list of numbers of accepted draft tokens, one for each step"
    for count in trace:
        if not is_int(count) or count < 0:
            return f"{count!r} must be an int >= 0"
    return f"it must have at most {CAPACITY} steps, got {len(trace)}" if len(trace) > CAPACITY else None


def trace_state(trace: tuple[int, ...]) -> list[StateSpec]:
    """State tensors: the trace, and the number of its steps that each slot's request has done."""
    return [
        StateSpec("forced_trace", (CAPACITY,), torch.int64, high=K + 1, initial=trace),
        StateSpec("forced_steps", (N,), torch.int64, high=CAPACITY),
    ]


def replayed(
    scores: torch.Tensor,
    drafts: torch.Tensor,
    text: torch.Tensor,
    length: torch.Tensor,
    slots: torch.Tensor,
    trace: torch.Tensor,
    steps: torch.Tensor,
    *,
    period: int,
) -> torch.Tensor:
    """Whether each draft is accepted, bool ``[B, K]``: as many as the trace's entry for the row's step. The first
    ``period`` entries repeat."""
    accepted = trace[steps[slots] % period]
    return torch.arange(drafts.shape[1], device=drafts.device) < accepted[:, None]


@dataclass(frozen=True)
class CountSteps(Pass):
    """Add 1 to the trace's step number of each row that proposed drafts and emitted tokens.

    Steps without drafts (K = 0, or one token is left) do not use an entry of the trace.
    """

    name: ClassVar[str] = "count_steps"
    looks_for: ClassVar[str] = "committed tokens"
    region: ClassVar[PassRegion] = "commit"
    requires: ClassVar[Facts] = facts("committed")
    provides: ClassVar[Facts] = facts("steps_counted")

    def run(self, graph: StepGraph) -> Changes:
        state = [graph.state(name) for name in ("forced_steps", "proposed", "emitted")]
        graph.insert(count_steps, *state, graph.values["slots"])
        return Changes(1)


def count_steps(steps: torch.Tensor, proposed: torch.Tensor, emitted: torch.Tensor, slots: torch.Tensor) -> None:
    """Update ``steps`` ``[N]`` in place, at ``slots`` ``[B]``. ``proposed`` and ``emitted`` are ``[N]``."""
    steps.index_put_((slots,), steps[slots] + ((proposed[slots] > 0) & (emitted[slots] > 0)))

"""A recorded trace of accepted counts, replayed step by step: how ``forced`` shows a policy what a run once saw."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from speccompile.graph.state import K, N, StateSpec
from speccompile.graph.step_graph import StepGraph
from speccompile.passes.base import Changes, Facts, Pass, PassRegion, facts

#: Most steps of a trace. The tensor has this size for every trace, so that no size depends on one.
CAPACITY = 4096

STATE = ("forced_trace", "forced_steps")


def trace_problem(trace: object) -> str | None:
    """What is wrong with the counts of a :class:`Replay`; None if nothing is."""
    if not isinstance(trace, list | tuple) or not trace:
        return "it has to be a list of accepted draft tokens, one entry a step"
    for count in trace:
        if not isinstance(count, int) or isinstance(count, bool) or count < 0:
            return f"{count!r} must be an int >= 0"
    return f"it has {len(trace)} steps, and there is room for {CAPACITY}" if len(trace) > CAPACITY else None


def trace_state(trace: tuple[int, ...]) -> list[StateSpec]:
    """The trace, and how many of its steps each slot's request has done."""
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
    """Which drafts pass, ``[B, K]``: as many as the trace has for the row's step, its first ``period`` entries over and
    over."""
    accepted = trace[steps[slots] % period]
    return torch.arange(drafts.shape[1], device=drafts.device) < accepted[:, None]


@dataclass(frozen=True)
class CountSteps(Pass):
    """A row that proposed and emitted something has done one more step of its trace.

    Steps without drafts (K = 0, or no room for more than one token) do not count.
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
    """All but slots ``[B]`` are ``[N]``."""
    steps.index_put_((slots,), steps[slots] + ((proposed[slots] > 0) & (emitted[slots] > 0)))

"""Steps that call our ops where others spell out what those compute: choice, commit and n-gram match."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import fx

import speccompile.lowering.ops  # noqa: F401  defines the ops
from speccompile.graph_capture.graph import StepGraph
from speccompile.passes.base import Changes, Facts, Pass, facts
from speccompile.sampling.noise import DRAFTS, TOKENS

STEP_OPS = "step_ops"


@dataclass(frozen=True)
class UseStepOps(Pass):
    """From here on passes insert an op of ours where there is one: for a device that has a kernel for each.

    Elsewhere they insert what the op computes, so that it prints as what it does.
    """

    name: ClassVar[str] = "use_step_ops"
    looks_for: ClassVar[str] = "a step"
    requires: ClassVar[Facts] = facts("captured")
    provides: ClassVar[Facts] = facts(STEP_OPS)
    optional: ClassVar[bool] = True

    def run(self, graph: StepGraph) -> Changes:
        return Changes(0, "choice, commit and n-gram match will be single ops")


def uses_step_ops(graph: StepGraph) -> bool:
    return STEP_OPS in graph.facts


def insert_choice(
    graph: StepGraph,
    scores: fx.Node,
    count: int,
    row_length: fx.Node | None = None,
    start: fx.Node | None = None,
    before: fx.Node | None = None,
) -> fx.Node:
    """Insert the op ``choose_tokens`` over the first ``count`` places of ``scores``; returns ``[B, count]``.

    Args:
        row_length: ``[B]``; with it tokens are drawn, by the noise of the places behind so many tokens. -inf is then
            what must not come.
        start: ``[B]``, as ``add_noise`` has it.
    """
    if row_length is None:
        token: fx.Node = graph.insert(_greatest, scores, before=before, count=count)
        return token
    state = [graph.state(name) for name in ("temperature", "seed")]
    own = [] if start is None else [start]
    nodes = (scores, row_length, graph.values["slots"], *state, *own)
    token = graph.insert(_drawn, *nodes, before=before, count=count)
    return token


def _greatest(scores: torch.Tensor, *, count: int) -> torch.Tensor:
    token: torch.Tensor = torch.ops.speccompile.choose_tokens(scores[:, :count])
    return token


def _drawn(
    scores: torch.Tensor,
    row_length: torch.Tensor,
    slots: torch.Tensor,
    temperature: torch.Tensor,
    seed: torch.Tensor,
    start: torch.Tensor | None = None,
    *,
    count: int,
) -> torch.Tensor:
    positions = row_length[:, None] + torch.arange(count, device=scores.device)
    stream = TOKENS if start is None else DRAFTS
    token: torch.Tensor = torch.ops.speccompile.choose_tokens(
        scores[:, :count], temperature[slots], seed[slots], positions, stream, start, True
    )
    return token

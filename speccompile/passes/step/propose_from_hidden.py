"""A ready drafter that proposes from hidden states of the target, too."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import fx

from speccompile.graph.step_graph import StepGraph
from speccompile.passes.base import Facts, facts
from speccompile.passes.step.propose import Propose
from speccompile.passes.step.propose_tree import ProposeTree


@dataclass(frozen=True)
class ProposeFromHidden(Propose):
    """Proposes as :class:`Propose`, by a function that also accepts the rows' hidden states: the taps at the last
    token that the target has processed, ``[B, taps * M]``. The newest token, which follows it, is not processed yet."""

    name: ClassVar[str] = "propose_from_hidden"
    looks_for: ClassVar[str] = "committed tokens and tapped hidden states"
    requires: ClassVar[Facts] = facts("target_inputs", "committed", "tapped")

    def read(self, graph: StepGraph) -> list[fx.Node]:
        return [_last_hidden(graph)]


@dataclass(frozen=True)
class ProposeTreeFromHidden(ProposeTree):
    """Proposes a tree as :class:`ProposeTree`, by a function that also accepts the rows' hidden states.

    Args:
        weights: as :class:`Propose` has them.
    """

    weights: tuple[tuple[str, torch.Tensor], ...] = field(default=(), compare=False)

    name: ClassVar[str] = "propose_tree_from_hidden"
    looks_for: ClassVar[str] = "committed tokens and tapped hidden states"
    requires: ClassVar[Facts] = facts("target_inputs", "committed", "tapped", "proposed")

    def read(self, graph: StepGraph) -> list[fx.Node]:
        return [_last_hidden(graph), *[graph.constant(name, value) for name, value in self.weights]]


def _last_hidden(graph: StepGraph) -> fx.Node:
    values = [graph.values[name] for name in ("slots", "positions", "tapped")]
    found: fx.Node = graph.insert(last_hidden, graph.state("length"), *values)
    return found


def last_hidden(
    length: torch.Tensor, slots: torch.Tensor, positions: torch.Tensor, tapped: torch.Tensor
) -> torch.Tensor:
    """The hidden state ``[B, taps * M]`` before each row's newest token.

    Args:
        length: int64 ``[N]``; slots: int64 ``[B]``.
        positions: int64 ``[B', T]``, of which a mixed step has more rows than requests that decode; theirs come first.
        tapped: ``[B', T, taps * M]``.
    """
    rows = slots.shape[0]
    # The token at length - 1 is the newest one.
    last = (length[slots] - 2 - positions[:rows, 0]).clamp(0, tapped.shape[1] - 1)
    return tapped[torch.arange(rows, device=slots.device), last]

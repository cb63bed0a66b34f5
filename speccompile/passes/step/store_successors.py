"""The likeliest tokens after each position that a step computes, kept as drafts of later steps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

import speccompile.ops  # noqa: F401  defines the ops
from speccompile.graph.step_graph import StepGraph
from speccompile.passes.base import Changes, Facts, Pass, PassRegion, facts


@dataclass(frozen=True)
class StoreSuccessors(Pass):
    """Writes the likeliest tokens of each position, by the target's own logits, to the tables of
    :mod:`speccompile.ops.successors`. Positions of drafts that are rejected count, too.

    Args:
        state: the names of the three tables.
    """

    state: tuple[str, str, str]

    name: ClassVar[str] = "store_successors"
    looks_for: ClassVar[str] = "logits of the step's positions"
    region: ClassVar[PassRegion] = "propose"
    requires: ClassVar[Facts] = facts("target_inputs", "step_logits", "drafts")
    provides: ClassVar[Facts] = facts("successors_stored")

    def run(self, graph: StepGraph) -> Changes:
        tables = [graph.state(name) for name in (*self.state, "tokens", "alive")]
        names = ("slots", "positions", "input_tokens", "drafts", "logits")
        values = [graph.values[name] for name in names]
        parents = [graph.values["parents"]] if "tree" in graph.facts else []
        graph.insert(store_successors, *tables, *values, *parents)
        width = int(graph.values["drafts"].meta["val"].shape[1]) + 1
        return Changes(1, f"the likeliest tokens after {width} positions of a row")


def store_successors(
    successors: torch.Tensor,
    logprobs: torch.Tensor,
    keys: torch.Tensor,
    tokens: torch.Tensor,
    alive: torch.Tensor,
    slots: torch.Tensor,
    positions: torch.Tensor,
    read: torch.Tensor,
    drafts: torch.Tensor,
    logits: torch.Tensor,
    parents: torch.Tensor | None = None,
) -> None:
    """See :func:`speccompile.ops.successors.store`; ``logits`` is ``[B, 1 + K, outputs]``."""
    vocab = successors.shape[0] - keys.shape[0]
    if logits.shape[-1] > vocab:
        # Outputs of the lm_head after the vocabulary are not tokens.
        logits = logits[..., :vocab]
    best = torch.ops.speccompile.likeliest(logits, successors.shape[1])
    torch.ops.speccompile.store_successors_(
        successors, logprobs, keys, tokens, alive, slots, positions, read, drafts, parents, *best
    )

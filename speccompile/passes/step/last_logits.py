"""Prefill needs the logits of one position, not of the whole chunk."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import fx

from speccompile.graph.step_graph import StepGraph
from speccompile.passes.base import Changes, Facts, Pass, PassRegion, facts


@dataclass(frozen=True)
class LastLogits(Pass):
    """The lm_head reads only the hidden state at ``last_index``: logits ``[B, T, V]`` become ``[B, 1, V]``.

    Names ``chunk_hidden`` ``[B, T, M]``, the hidden states of all positions.
    """

    name: ClassVar[str] = "last_logits"
    named_values: ClassVar[tuple[str, ...]] = ("chunk_hidden",)
    looks_for: ClassVar[str] = "an lm_head that reads a hidden state"
    region: ClassVar[PassRegion] = "model"
    requires: ClassVar[Facts] = facts("logits", "last_index")
    provides: ClassVar[Facts] = facts("step_logits")
    invalidates: ClassVar[Facts] = facts("logits")

    def run(self, graph: StepGraph) -> Changes:
        hidden = graph.anchors.final_norm
        readers = lm_head_readers(graph)
        last = graph.insert(at_index, hidden, graph.values["last_index"], before=readers[0])
        for reader in readers:
            reader.replace_input_with(hidden, last)
        graph.anchors.final_norm = last
        graph.values["chunk_hidden"] = hidden
        return Changes(len(readers), "lm_head on one position a row")


def lm_head_readers(graph: StepGraph) -> list[fx.Node]:
    """Readers of the final norm's output on its way to the logits. Others, such as taps, need all positions."""
    hidden, on_the_way = graph.anchors.final_norm, set[fx.Node]()
    found = [graph.values["logits"]]
    while found:
        node = found.pop()
        if node is not hidden and node not in on_the_way:
            on_the_way.add(node)
            found.extend(node.all_input_nodes)
    return [user for user in hidden.users if user in on_the_way]


def at_index(hidden: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """``[B, T, M]`` at ``index`` ``[B]``: ``[B, 1, M]``."""
    rows = torch.arange(hidden.shape[0], device=hidden.device)
    return hidden[rows, index][:, None]

"""Inputs of the target model in a step: tokens and positions, computed from state inside the graph."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import fx

from speccompile.graph.step_graph import StepGraph
from speccompile.ops.step_inputs import newest_and_drafts
from speccompile.passes.base import Changes, Facts, Pass, PassRegion, facts


@dataclass(frozen=True)
class VerifyInputs(Pass):
    """The target reads the newest committed token and the drafts, at positions ``length-1 .. length-1+K``.

    ``width``, at least K+1, is what the target computes; places after the drafts hold padding, and the logits are cut
    to ``[B, K+1, V]``.
    """

    draft_len: int
    width: int

    name: ClassVar[str] = "verify_inputs"
    named_values: ClassVar[tuple[str, ...]] = ("input_tokens", "positions")
    looks_for: ClassVar[str] = "the inputs input_ids and position_ids"
    region: ClassVar[PassRegion] = "inputs"
    requires: ClassVar[Facts] = facts("outlined", "rows", "drafts", "drafts_limited")
    # Every position of the verify width is judged, so the logits are those of the step as they are.
    provides: ClassVar[Facts] = facts("target_inputs", "step_logits")

    def run(self, graph: StepGraph) -> Changes:
        read, positions = graph.insert(
            newest_and_drafts,
            graph.state("tokens"),
            graph.state("length"),
            graph.values["slots"],
            graph.values["drafts"],
            before=graph.anchors.start,
            width=self.width,
            vocab_size=graph.layout.vocab_size,
        )
        feed_target(graph, read, positions, self.width)
        judged = self.draft_len + 1
        if judged < self.width:
            logits = graph.insert(first_places, graph.values["logits"], count=judged)
            graph.values["logits"]._rename("padded_logits")
            graph.name_value("logits", logits)
            graph.set_outputs(logits)
        return Changes(2, f"the target reads {list(read.meta['val'].shape)}")


@dataclass(frozen=True)
class PrefillInputs(Pass):
    """The target reads ``width`` prompt tokens of one slot, from ``prefill_start`` on.

    Leaves ``last_index`` ``[B]``, the place in the chunk of the prompt's last token, and ``ready`` ``[B]``, whether
    the chunk holds it.
    """

    width: int

    name: ClassVar[str] = "prefill_inputs"
    named_values: ClassVar[tuple[str, ...]] = ("input_tokens", "positions", "last_index", "ready")
    looks_for: ClassVar[str] = "the inputs input_ids and position_ids"
    region: ClassVar[PassRegion] = "inputs"
    requires: ClassVar[Facts] = facts("outlined", "rows", "drafts")
    provides: ClassVar[Facts] = facts("target_inputs", "last_index")

    def run(self, graph: StepGraph) -> Changes:
        read, positions, last_index, ready = graph.insert(
            prompt_chunk,
            graph.state("tokens"),
            graph.state("length"),
            graph.values["slots"],
            graph.state("prefill_start"),
            before=graph.anchors.start,
            width=self.width,
        )
        graph.name_value("last_index", last_index)
        graph.name_value("ready", ready)
        feed_target(graph, read, positions, self.width)
        return Changes(2, f"the target reads a chunk of {self.width}")


def feed_target(graph: StepGraph, read: fx.Node, positions: fx.Node, width: int) -> None:
    """Let the target read these tokens at these positions, ``[B, T]`` each."""
    graph.bind_input("input_ids", read)
    graph.bind_input("position_ids", positions)
    graph.name_value("input_tokens", read)
    graph.name_value("positions", positions)
    graph.sizes = {**graph.sizes, "T": width}


def first_places(logits: torch.Tensor, *, count: int) -> torch.Tensor:
    """``[B, T, V]`` cut to its first ``count`` places."""
    return logits[:, :count]


def prompt_chunk(
    tokens: torch.Tensor, length: torch.Tensor, slots: torch.Tensor, start: torch.Tensor, *, width: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Tokens and positions ``[1, T]`` of a prefill chunk, ``last_index`` ``[1]`` and ``ready`` ``[1]``.

    The chunk may reach past the cache; those places share the last one, which no sequence ever owns.
    """
    positions = (start[:, None] + torch.arange(width, device=tokens.device)).clamp(max=tokens.shape[1] - 1)
    # After the prompt its last token is read, as in a verify step.
    read = tokens[slots[:, None], torch.minimum(positions, (length[slots] - 1)[:, None])]
    last = length[slots] - 1 - start
    return read, positions, last.clamp(0, width - 1), last < width

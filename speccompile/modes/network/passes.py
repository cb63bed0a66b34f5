"""A mode's own network in a step: its forwards, and how its KV follows the text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import fx

from speccompile.errors import PassError
from speccompile.graph.splicing import splice_graph
from speccompile.graph.step_graph import StepGraph
from speccompile.modes.network.other_vocabulary import known_tokens, over_target
from speccompile.passes.base import Changes, Facts, Pass, PassRegion, facts
from speccompile.passes.step.draft_chain import DraftChain, Forward


def drafter_of(graph: StepGraph) -> StepGraph:
    """Raises PassError: the mode has no network."""
    if graph.drafter is None:
        raise PassError("the mode of this step has no network of its own (Mode.network) to copy into it")
    return graph.drafter


def forward_drafter(
    graph: StepGraph,
    tokens: fx.Node,
    positions: fx.Node,
    slots: fx.Node,
    *,
    before: fx.Node,
    outputs: Sequence[str] = ("logits",),
    given: Mapping[str, fx.Node] | None = None,
    drafter: StepGraph | None = None,
) -> list[fx.Node]:
    """Copy a forward of the drafter into the step. It writes its KV, and reads what earlier ones wrote.

    Args:
        tokens, positions: int64 ``[B, T]``; slots: ``[B]``. After the drafter's own ``max_len`` all positions are one
            place that no text owns.
        outputs: names of what the network computes, or ``"kv"``: nothing but its KV, without the lm_head.
        given: what stands for another input of the network (``hidden_states``), or for anything that it would compute
            itself, by name.
        drafter: the network in another form; None is as the step has it.

    Returns:
        What stands for ``outputs``; of ``"kv"``, what the last layer leaves.
    """
    drafter = drafter or drafter_of(graph)
    inputs = {node.name: node for node in drafter.placeholders}
    named = {**inputs, **drafter.values, "kv": drafter.anchors.layers[-1]}
    # What a text that the drafter can read never reaches, as in a prompt chunk's padding.
    positions = graph.insert(at_most, positions, before=before, most=drafter.layout.cache_len - 1)
    replaced = {inputs["input_ids"]: tokens, inputs["position_ids"]: positions, inputs["row_slots"]: slots}
    replaced |= {named[name]: node for name, node in (given or {}).items()}
    return splice_graph(graph, drafter, replaced, [named[name] for name in outputs], before)


def at_most(positions: torch.Tensor, *, most: int) -> torch.Tensor:
    return positions.clamp(max=most)


def forward_model(
    graph: StepGraph,
    tokens: fx.Node,
    positions: fx.Node,
    slots: fx.Node,
    *,
    before: fx.Node,
    output: str = "logits",
) -> fx.Node:
    """Copy a forward of a draft model, as :func:`forward_drafter`: tokens and logits are the target's, also where the
    vocabularies are padded to different sizes."""
    known = known_tokens(graph, tokens, drafter_of(graph), before)
    (found,) = forward_drafter(graph, known, positions, slots, before=before, outputs=(output,))
    return over_target(graph, found, before) if output == "logits" else found


@dataclass(frozen=True)
class DraftByNetwork(DraftChain):
    """Forwards of a language model that drafts."""

    name: ClassVar[str] = "draft_by_network"
    looks_for: ClassVar[str] = "the mode's network"

    def forward(self, graph: StepGraph) -> Forward:
        slots, start = graph.values["slots"], graph.anchors.start

        def forward(token: fx.Node, position: fx.Node, place: int) -> fx.Node:
            return forward_model(graph, token, position, slots, before=start)

        return forward

    def what(self, graph: StepGraph) -> str:
        return f"{self.draft_len} forwards of {len(drafter_of(graph).anchors.layers)} layers"

    def max_len(self, graph: StepGraph) -> int:
        return drafter_of(graph).layout.max_len


@dataclass(frozen=True)
class ReadAlong(Pass):
    """The drafter reads what the target reads: the newest token and the drafts, a prompt's chunk, or both. So its KV is
    that of the text at every tier, K=0 included, and of rejected drafts nothing is ever read."""

    name: ClassVar[str] = "read_along"
    looks_for: ClassVar[str] = "what the target reads"
    region: ClassVar[PassRegion] = "propose"
    requires: ClassVar[Facts] = facts("target_inputs", "committed")
    provides: ClassVar[Facts] = facts("drafter_read")

    def run(self, graph: StepGraph) -> Changes:
        values = graph.values
        slots = values.get("target_slots", values["slots"])
        read, positions = values["input_tokens"], values["positions"]
        forward_model(graph, read, positions, slots, before=graph.output, output="kv")
        return Changes(1, f"the drafter reads {list(read.meta['val'].shape)} too")

"""Passes of a mode's network: its forwards in a step, and the update of its KV."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import fx

from speccompile.errors import PassError
from speccompile.graph.splicing import splice_graph
from speccompile.graph.step_graph import StepGraph
from speccompile.modes.network.other_vocabulary import known_tokens, over_target
from speccompile.ops.draft_rows import form_of, network_positions
from speccompile.ops.unread_rows import note_read_
from speccompile.passes.base import Changes, Facts, Pass, PassRegion, facts
from speccompile.passes.step.draft_chain import DraftChain, Forward

#: State ``[N]``: the number of tokens of each sequence that the drafter has read.
READ_LEN = "read_len"


def drafter_of(graph: StepGraph) -> StepGraph:
    """The captured graph of the mode's network.

    Raises:
        PassError: the mode has no network.
    """
    if graph.drafter is None:
        raise PassError("the mode of this step has no network to copy into it; return one from its Mode.network")
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
    back: int = 0,
) -> list[fx.Node]:
    """Copy a forward of the drafter into the step. It writes the drafter's KV, and attends to the KV of earlier
    forwards.

    Args:
        tokens, positions: int64 ``[B, T]``; slots: ``[B]``. Positions after the drafter's own ``max_len`` are replaced
            by the last position of its cache, which no sequence uses.
        before: the node before which the copy is inserted.
        outputs: names of values of the network; or ``"kv"``, which only writes KV and does not run the lm_head.
        given: nodes that replace further inputs of the network (``hidden_states``) or values that it computes, by name.
        drafter: the network in another form; None is the step's own drafter.
        back: the network reads each token at a position this much before the given one, at least 0.

    Returns:
        The nodes of ``outputs``. The node of ``"kv"`` is the output of the last layer.
    """
    drafter = drafter or drafter_of(graph)
    inputs = {node.name: node for node in drafter.placeholders}
    named = {**inputs, **drafter.values, "kv": drafter.anchors.layers[-1]}
    # Sequences within the drafter's max_len never reach this position. Others do, and so does the padding of a prompt
    # chunk.
    function, most = form_of(network_positions, graph.facts), drafter.layout.cache_len - 1
    positions = graph.insert(function, positions, before=before, back=back, most=most)
    replaced = {inputs["input_ids"]: tokens, inputs["position_ids"]: positions, inputs["row_slots"]: slots}
    replaced |= {named[name]: node for name, node in (given or {}).items()}
    return splice_graph(graph, drafter, replaced, [named[name] for name in outputs], before)


def forward_model(
    graph: StepGraph,
    tokens: fx.Node,
    positions: fx.Node,
    slots: fx.Node,
    *,
    before: fx.Node,
    output: str = "logits",
) -> fx.Node:
    """Copy a forward of a draft model into the step, by :func:`forward_drafter`.

    Tokens and logits are those of the target's vocabulary, also if the vocabularies are padded to different sizes.
    """
    known = known_tokens(graph, tokens, drafter_of(graph), before)
    (found,) = forward_drafter(graph, known, positions, slots, before=before, outputs=(output,))
    return over_target(graph, found, before) if output == "logits" else found


def note_read(graph: StepGraph, width: int, *, before: fx.Node) -> None:
    """Count the next ``width`` tokens of each row as read by the drafter, up to the newest but one."""
    nodes = (graph.state(READ_LEN), graph.state("length"), graph.values["slots"])
    graph.insert(form_of(note_read_, graph.facts), *nodes, before=before, width=width)


@dataclass(frozen=True)
class DraftByNetwork(DraftChain):
    """Draft a chain with forwards of a language model, one for each token."""

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
    """Insert a forward of the drafter over the tokens that the target reads: the newest token and the drafts, a
    prompt's chunk, or both.

    KV of rejected drafts is never read.

    Args:
        notes_read: count the rows as read, for :class:`~speccompile.modes.network.catch_up.CatchUp`.
    """

    notes_read: bool = False

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
        if self.notes_read:
            note_read(graph, read.meta["val"].shape[1], before=graph.output)
        return Changes(1, f"the drafter reads {list(read.meta['val'].shape)} too")

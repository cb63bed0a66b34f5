"""A DFlash head in a step: keeping its context, and drafting.

Of a sequence of L tokens the target has read L - 1, whose hidden states are the context at the places 0 .. L - 2. The
block of the newest token and mask tokens stands at the places from L - 1 on. What it leaves there is dead when the step
ends: the context of the positions that the target reads is written over it, and the next block over the rest.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import fx

from speccompile.graph.splicing import PREFIX, splice_graph
from speccompile.graph.step_graph import StepGraph
from speccompile.modes.network.draft_at_once import DraftAtOnce, with_masks
from speccompile.modes.network.passes import at_most, drafter_of
from speccompile.passes.base import Changes, Facts, Pass, PassRegion, facts


@dataclass(frozen=True)
class KeepContext(Pass):
    """The hidden states of the positions that the target has read become the head's KV. Rejected drafts leave some
    after the end of the sequence, which the next block overwrites before any query attends to it. This does not depend
    on the tier, so tiers can follow one another in any order.
    """

    name: ClassVar[str] = "keep_context"
    looks_for: ClassVar[str] = "what the target reads"
    region: ClassVar[PassRegion] = "propose"
    requires: ClassVar[Facts] = facts("target_inputs", "committed", "tapped")
    provides: ClassVar[Facts] = facts("drafter_read")

    def run(self, graph: StepGraph) -> Changes:
        head, values = drafter_of(graph), graph.values
        slots, layers = values.get("target_slots", values["slots"]), len(head.anchors.layers)
        positions = graph.insert(at_most, values["positions"], most=head.layout.cache_len - 1)
        inputs = {node.name: node for node in head.placeholders}
        given = {inputs["hidden_states"]: values["tapped"], inputs["position_ids"]: positions}
        names = [name for index in range(layers) for name in (f"key_{index}", f"value_{index}")]
        made = splice_graph(graph, head, given, [head.values[name] for name in names], graph.output)
        state = [graph.state(f"{PREFIX}{kind}_{index}") for index in range(layers) for kind in "kv"]
        graph.insert(write_context, slots, positions, *made, *state)
        return Changes(layers, f"KV of {layers} layers from {list(values['tapped'].meta['val'].shape)}")


def write_context(slots: torch.Tensor, positions: torch.Tensor, *tensors: torch.Tensor) -> None:
    """Write ``[B, T, G, D]``, the first half of ``tensors``, to the rows' places of ``[N, S, G, D]``, the second.

    Args:
        slots: ``[B]``; positions: ``[B, T]``.
    """
    half = len(tensors) // 2
    for value, cache in zip(tensors[:half], tensors[half:], strict=True):
        cache.index_put_((slots[:, None], positions), value)


@dataclass(frozen=True)
class DraftBlock(DraftAtOnce):
    """One forward of the newest token and all mask tokens of the head's block; the first ``draft_len`` of them become
    drafts. A block of another size would be other drafts."""

    block_size: int = field(kw_only=True)
    mask_token_id: int = field(kw_only=True)

    name: ClassVar[str] = "draft_block"
    looks_for: ClassVar[str] = "the mode's head"

    def logits(self, graph: StepGraph, token: fx.Node, position: fx.Node) -> fx.Node:
        head, slots, start = drafter_of(graph), graph.values["slots"], graph.anchors.start
        sizes = {"block_size": self.block_size, "mask_token_id": self.mask_token_id}
        most = head.layout.cache_len - 1
        block, positions = graph.insert(masked_block, token, position, before=start, **sizes, most=most)
        inputs = {node.name: node for node in head.placeholders}
        given = {
            inputs["input_ids"]: block,
            inputs["row_slots"]: slots,
            head.values["block_positions"]: positions,
        }
        (normed,) = splice_graph(graph, head, given, [head.values["normed"]], start)
        drafted = graph.insert(mask_places, normed, before=start, draft_len=self.draft_len)
        (logits,) = splice_graph(graph, head, {head.values["normed"]: drafted}, [head.values["logits"]], start)
        return logits

    def what(self, graph: StepGraph) -> str:
        return f"{self.draft_len} of a block of {self.block_size} in one forward"


def masked_block(
    token: torch.Tensor, position: torch.Tensor, *, block_size: int, mask_token_id: int, most: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """``token`` ``[B, 1]`` and mask tokens, ``[B, block_size]``, and their positions from ``position`` ``[B, 1]`` on.
    Those of a sequence that the head does not draft for are at most ``most``."""
    block, positions = with_masks(token, position, count=block_size - 1, mask_token_id=mask_token_id)
    return block, positions.clamp(max=most)


def mask_places(normed: torch.Tensor, *, draft_len: int) -> torch.Tensor:
    """``[B, block_size, M]`` to the first mask tokens, ``[B, K, M]``."""
    return normed[:, 1 : draft_len + 1].contiguous()

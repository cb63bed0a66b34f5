"""Passes of a DFlash head: updating its context, and drafting.

The target has read L - 1 tokens of a sequence of L tokens. Their hidden states are the context, at the positions 0 .. L
- 2. The block of the newest token and mask tokens has the positions from L - 1 on. KV of a block is not read after its
step: the context of the positions that the target reads overwrites it, and the next block overwrites the rest.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf
from typing import ClassVar

import torch
from torch import fx

from speccompile.graph.paging import PAGES, page_and_place
from speccompile.graph.splicing import PREFIX, splice_graph
from speccompile.graph.step_graph import StepGraph
from speccompile.modes.network.draft_at_once import DraftAtOnce, at_place, with_masks
from speccompile.modes.network.head_passes import chooses_in_part, target_ids_of
from speccompile.modes.network.passes import drafter_of
from speccompile.ops.draft_rows import form_of, network_positions
from speccompile.passes.base import Changes, Facts, Pass, PassRegion, facts

#: The name of the outputs at the places of drafts, ``[B, K, M]``, among a step's values.
OUTPUTS = "block_outputs"
#: The name of Domino's state after the newest token of each path, ``[B, n, size]``.
STATE = "block_state"


@dataclass(frozen=True)
class KeepContext(Pass):
    """Store the KV of the positions that the target has read, computed from their hidden states.

    KV of rejected drafts stays after the end of the sequence. The next block overwrites it before any query attends to
    it. This does not depend on the tier, so tiers can follow one another in any order.
    """

    name: ClassVar[str] = "keep_context"
    looks_for: ClassVar[str] = "what the target reads"
    region: ClassVar[PassRegion] = "propose"
    requires: ClassVar[Facts] = facts("target_inputs", "committed", "tapped")
    provides: ClassVar[Facts] = facts("drafter_read")

    def run(self, graph: StepGraph) -> Changes:
        head, values = drafter_of(graph), graph.values
        slots, layers = values.get("target_slots", values["slots"]), len(head.anchors.layers)
        function, most = form_of(network_positions, graph.facts), head.layout.cache_len - 1
        positions = graph.insert(function, values["positions"], back=0, most=most)
        inputs = {node.name: node for node in head.placeholders}
        given = {inputs["hidden_states"]: values["tapped"], inputs["position_ids"]: positions}
        names = [name for index in range(layers) for name in (f"key_{index}", f"value_{index}")]
        made = splice_graph(graph, head, given, [head.values[name] for name in names], graph.output)
        state = [graph.state(f"{PREFIX}{kind}_{index}") for index in range(layers) for kind in "kv"]
        paging = graph.layout.paging
        if paging is None:
            graph.insert(write_context, slots, positions, *made, *state)
        else:
            pages = graph.state(PAGES)
            graph.insert(write_context_in_pages, pages, slots, positions, *made, *state, size=paging.size)
        return Changes(layers, f"KV of {layers} layers from {list(values['tapped'].meta['val'].shape)}")


def write_context(slots: torch.Tensor, positions: torch.Tensor, *tensors: torch.Tensor) -> None:
    """Write keys and values to the rows' slots and positions.

    Args:
        slots: ``[B]``; positions: ``[B, T]``.
        tensors: first the values ``[B, T, G, D]``, then as many state tensors ``[N, S, G, D]``.
    """
    _write((slots[:, None], positions), tensors)


def write_context_in_pages(
    pages: torch.Tensor, slots: torch.Tensor, positions: torch.Tensor, *tensors: torch.Tensor, size: int
) -> None:
    """:func:`write_context` where the state tensors are pools ``[P, C, G, D]``, by the table ``pages`` ``[N, M]``."""
    _write(page_and_place(pages, slots[:, None], positions, size=size), tensors)


def _write(where: tuple[torch.Tensor, torch.Tensor], tensors: Sequence[torch.Tensor]) -> None:
    half = len(tensors) // 2
    for value, cache in zip(tensors[:half], tensors[half:], strict=True):
        cache.index_put_(where, value)


@dataclass(frozen=True)
class DraftBlock(DraftAtOnce):
    """Draft with one forward of the newest token and all mask tokens of the head's block. The outputs at the first
    ``draft_len`` mask tokens become drafts, or with ``sample_from_anchor`` those at the first ``draft_len`` tokens.

    The block always has its full size, since drafts depend on the size. With ``markov_rank`` above 0 the token before
    each draft adds a bias to its logits. With ``selects`` that token and the output choose among the likeliest ones.
    With ``corrects_from`` a state that follows all drafts before corrects the logits from that draft on.
    """

    block_size: int = field(kw_only=True)
    mask_token_id: int = field(kw_only=True)
    sample_from_anchor: bool = field(default=False, kw_only=True)
    markov_rank: int = field(default=0, kw_only=True)
    selects: bool = field(default=False, kw_only=True)
    corrects_from: int | None = field(default=None, kw_only=True)

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
        first = 0 if self.sample_from_anchor else 1
        drafted = graph.insert(draft_places, normed, before=start, first=first, draft_len=self.draft_len)
        (logits,) = splice_graph(graph, head, {head.values["normed"]: drafted}, [head.values["logits"]], start)
        if self.selects or self.corrects_from is not None:
            graph.values[OUTPUTS] = drafted
        return logits if self.follows_drafts else self._choosable(graph, logits)

    @property
    def follows_drafts(self) -> bool:
        return self.markov_rank > 0 or self.selects or self.corrects_from is not None

    def after_token(self, graph: StepGraph, logits: fx.Node, token: fx.Node, place: int) -> fx.Node:
        if not self.follows_drafts:
            # :meth:`logits` has prepared those of all places together.
            return logits
        head, start = drafter_of(graph), graph.anchors.start
        inputs = {node.name: node for node in head.placeholders}
        if self.selects or self.corrects_from is not None:
            normed = graph.insert(at_place, graph.values[OUTPUTS], before=start, place=place)
            normed, logits = graph.insert(for_tokens, token, normed, logits, before=start)
            given = {inputs["input_ids"]: token, head.values["normed"]: normed, head.values["logits"]: logits}
            if self.corrects_from is None:
                (selected,) = splice_graph(graph, head, given, [head.values["selected"]], start)
                return selected
            if place:
                given[head.values["state_before"]] = graph.values[STATE]
            names = [*["corrected"] * (place >= self.corrects_from), "state"]
            *corrected, state = splice_graph(graph, head, given, [head.values[name] for name in names], start)
            graph.values[STATE] = state
            return self._choosable(graph, corrected[0] if corrected else logits)
        (bias,) = splice_graph(graph, head, {inputs["input_ids"]: token}, [head.values["bias"]], start)
        return self._choosable(graph, graph.insert(add_bias, logits, bias, before=start))

    def _choosable(self, graph: StepGraph, logits: fx.Node) -> fx.Node:
        """The logits that drafts are chosen from, of those of the head's vocabulary."""
        head, start = drafter_of(graph), graph.anchors.start
        if "target_ids" not in head.values or chooses_in_part(head, draws=self.draws):
            return logits
        (ids,) = splice_graph(graph, head, {}, [head.values["target_ids"]], start)
        vocab = graph.layout.vocab_size
        whole: fx.Node = graph.insert(over_target_vocabulary, logits, ids, before=start, vocab_size=vocab)
        return whole

    def token_ids(self, graph: StepGraph) -> fx.Node | None:
        return target_ids_of(graph, draws=self.draws)

    def what(self, graph: StepGraph) -> str:
        return f"{self.draft_len} of a block of {self.block_size} in one forward"


def for_tokens(token: torch.Tensor, *of_place: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Values ``[B, 1, ...]`` of one place, for each of the tokens before it, ``token`` ``[B, T]``: ``[B, T, ...]``."""
    return tuple(value.expand(-1, token.shape[1], -1).contiguous() for value in of_place)


def masked_block(
    token: torch.Tensor, position: torch.Tensor, *, block_size: int, mask_token_id: int, most: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The block ``[B, block_size]``, which is ``token`` ``[B, 1]`` and mask tokens; and its positions, from
    ``position`` ``[B, 1]`` on.

    Positions are at most ``most``: sequences that are too long for the head can exceed it.
    """
    block, positions = with_masks(token, position, count=block_size - 1, mask_token_id=mask_token_id)
    return block, positions.clamp(max=most)


def draft_places(normed: torch.Tensor, *, first: int, draft_len: int) -> torch.Tensor:
    """The outputs that become drafts, ``[B, K, M]``, of those of the block, ``[B, block_size, M]``."""
    return normed[:, first : first + draft_len].contiguous()


def add_bias(logits: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """Logits ``[B, T, Vd]`` with the bias ``[B, T, Vd]`` by the token before; the logits may be of one place ``[B, 1,
    Vd]``."""
    return logits + bias


def over_target_vocabulary(logits: torch.Tensor, ids: torch.Tensor, *, vocab_size: int) -> torch.Tensor:
    """Logits ``[B, T, V]`` over the target's vocabulary, -inf at tokens that the head cannot draft, of ``logits`` ``[B,
    T, Vd]`` of the tokens ``ids`` ``[Vd]``."""
    whole = logits.new_full((*logits.shape[:-1], vocab_size), -inf)
    return whole.index_copy(-1, ids, logits)

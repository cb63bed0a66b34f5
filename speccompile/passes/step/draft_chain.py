"""Sequential drafting: K forwards of one token a row, each from the token of the previous one."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import fx

from speccompile.graph.step_graph import StepGraph
from speccompile.graph.tree import STORED
from speccompile.ops.draft_rows import cut_drafts, form_of, newest_tokens, next_token, side_by_side
from speccompile.ops.row_contexts import put_tokens
from speccompile.passes.base import Changes, Facts, Pass, PassRegion, facts
from speccompile.passes.step.drafts import set_drafts
from speccompile.passes.step.sample import draw, probabilities, process
from speccompile.passes.step.use_filters import filter_state, uses_filters

#: Token ``[B, 1]``, its position ``[B, 1]`` and its place in the draft to logits ``[B, 1, V]``, or of a part of the
#: vocabulary, see :meth:`DraftChain.token_ids`.
Forward = Callable[[fx.Node, fx.Node, int], fx.Node]


@dataclass(frozen=True)
class DraftChain(Pass):
    """``draft_len`` forwards of one token a row before the target, whose tokens are the step's drafts. A drafter is a
    subclass that defines :meth:`forward`.

    With ``draws`` logits go through the request's own pipeline, and the target's noise of the place is added: the
    drafter draws the same token as the target where their scores agree. With ``probabilities`` it draws with separate
    noise, which no later step repeats, and names its distributions ``draft_probs`` ``[B, K, V]``.

    With ``begin`` > 0 the chain continues the first ``begin`` drafts, which another executable has stored. Then
    ``drafts`` are ``[B, K - begin]``, and ``draft_probs`` ``[B, K - begin, V]``.
    """

    draft_len: int
    draws: bool = False
    probabilities: bool = False
    begin: int = field(default=0, kw_only=True)

    region: ClassVar[PassRegion] = "draft"
    requires: ClassVar[Facts] = facts("outlined", "rows")
    provides: ClassVar[Facts] = facts("drafts")

    @abstractmethod
    def forward(self, graph: StepGraph) -> Forward:
        """A function that inserts the drafter's ops for one place before ``graph.anchors.start``."""

    def token_ids(self, graph: StepGraph) -> fx.Node | None:
        """The target's ids ``[Vd]`` of the tokens that the logits belong to; None is all of them."""
        return None

    def first_draft(self, graph: StepGraph) -> fx.Node | None:
        """The first draft ``[B, 1]``, the target's id, if the previous step chose it. Called only if no draft is drawn
        with noise.
        """
        return None

    @abstractmethod
    def what(self, graph: StepGraph) -> str:
        """A description of the inserted ops, for the stage's note."""

    def max_len(self, graph: StepGraph) -> int:
        """The drafter's longest sequence. Rows whose drafts would exceed it have fewer, or none."""
        return graph.layout.max_len

    def run(self, graph: StepGraph) -> Changes:
        forward, slots, start = self.forward(graph), graph.values["slots"], graph.anchors.start
        ids = self.token_ids(graph)
        first = None if self.draws or self.begin else self.first_draft(graph)
        state = [graph.state(name) for name in ("tokens", "length", "limit")]
        sizes = {"draft_len": self.draft_len, "max_len": self.max_len(graph)}
        token, position, lens = graph.insert(form_of(newest_tokens, graph.facts), *state, slots, before=start, **sizes)
        drafted, drawn_from = [], []
        if self.draws:
            context, length = graph.insert(text_so_far, *state[:2], slots, before=start)
            begun = length
        if self.begin:
            stored = graph.insert(stored_drafts, graph.state(STORED[0]), slots, before=start, count=self.begin)
            token, position = graph.insert(last_draft, stored, position, before=start)
            if self.draws:
                context, length = graph.insert(append_token, context, length, stored, before=start)
        for place in range(self.begin, self.draft_len):
            logits, own_ids = forward(token, position, place), None
            if self.draws and uses_filters(graph) and not self.probabilities:
                options = [*filter_state(graph), graph.state("length"), graph.state("seed")]
                drawn = graph.insert(draw_draft, logits, slots, *options, before=start, place=place)
            elif self.draws:
                logits = process(graph, logits, context, length, start, drafted=place)
                if self.probabilities:
                    nodes = (logits, graph.state("temperature"), slots)
                    drawn_from.append(graph.insert(slot_probabilities, *nodes, before=start))
                noise = [graph.state(name) for name in ("temperature", "seed")]
                own = [begun] if self.probabilities else []
                drawn = graph.insert(draw, logits, length, slots, *noise, *own, before=start)
            elif place == 0 and first is not None:
                drawn = first
            else:
                drawn, own_ids = graph.insert(torch.ops.speccompile.choose, logits, before=start), ids
            read = [drawn, position, *([] if own_ids is None else [own_ids])]
            token, position = graph.insert(form_of(next_token, graph.facts), *read, before=start)
            if self.draws:
                context, length = graph.insert(append_token, context, length, token, before=start)
            drafted.append(token)
        if drawn_from:
            graph.name_value("draft_probs", graph.insert(one_after_another, *drawn_from, before=start))
        tokens = graph.insert(form_of(side_by_side, graph.facts), *drafted, before=start)
        cut = graph.insert(form_of(cut_drafts, graph.facts), tokens, lens, before=start, begin=self.begin)
        set_drafts(graph, cut, lens)
        return Changes(self.draft_len - self.begin, self.what(graph))


def draw_draft(logits: torch.Tensor, slots: torch.Tensor, *state: torch.Tensor, place: int) -> torch.Tensor:
    """The token ``[B, 1]`` of logits ``[B, 1, V]``, ``place`` tokens after the sequence, by filters and noise.

    Args:
        state: of the filters, then length and seed, ``[N]``.
    """
    depths = torch.full(logits.shape[:2], place, device=logits.device) if place else None
    token: torch.Tensor = torch.ops.speccompile.draw_filtered(logits, slots, *state, depths)
    return token


def stored_drafts(draft_tokens: torch.Tensor, slots: torch.Tensor, *, count: int) -> torch.Tensor:
    """The first ``count`` of the stored drafts ``[N, Kmax]``, ``[B, count]``; arbitrary ones after a row's own."""
    return draft_tokens[slots, :count].clamp(min=0)


def last_draft(stored: torch.Tensor, position: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The last of ``stored`` ``[B, count]``, ``[B, 1]``, and its position, where ``position`` is that before them."""
    return stored[:, -1:].contiguous(), position + stored.shape[1]


def text_so_far(tokens: torch.Tensor, length: torch.Tensor, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Each row's tokens ``[B, S]`` and their number ``[B]``."""
    return tokens[slots], length[slots]


def append_token(
    context: torch.Tensor, row_length: torch.Tensor, token: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The tokens with the next ones ``[B, T]``, and their number."""
    return put_tokens(context, row_length, token), row_length + token.shape[1]


def slot_probabilities(scores: torch.Tensor, temperature: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    return probabilities(scores, temperature[slots])


def one_after_another(*places: torch.Tensor) -> torch.Tensor:
    """Concatenate tensors ``[B, T, ...]`` along T: K of ``[B, 1, V]`` become ``[B, K, V]``."""
    return torch.cat(places, dim=1)

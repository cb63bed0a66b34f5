"""Drafting of all tokens in one forward, which reads mask tokens at the positions of the drafts."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import fx

from speccompile.graph.step_graph import StepGraph
from speccompile.modes.network.passes import DraftByNetwork, drafter_of, forward_model
from speccompile.ops.draft_rows import cut_drafts, form_of, newest_tokens
from speccompile.passes.base import Changes
from speccompile.passes.step.draft_chain import Forward
from speccompile.passes.step.drafts import set_drafts


@dataclass(frozen=True)
class DraftAtOnce(DraftByNetwork):
    """Draft all tokens from the logits of one forward.

    A greedy step chooses all tokens at once. A step that draws chooses one after another, since the request's logits
    processors read the tokens before. So does a drafter whose logits follow from the tokens before
    (:attr:`follows_drafts`).
    """

    @abstractmethod
    def logits(self, graph: StepGraph, token: fx.Node, position: fx.Node) -> fx.Node:
        """Insert the forward before ``graph.anchors.start``.

        Args:
            token, position: ``[B, 1]``, the newest token and its position.

        Returns:
            Logits ``[B, K, V]``, or ``[B, K, Vd]`` of the vocabulary that :meth:`token_ids` returns.
        """

    @property
    def follows_drafts(self) -> bool:
        """Whether :meth:`after_token` changes logits."""
        return False

    def after_token(self, graph: StepGraph, logits: fx.Node, token: fx.Node, place: int) -> fx.Node:
        """The final logits ``[B, T, V]`` of the draft ``place``, from 0, after the tokens ``token`` ``[B, T]``, from
        those of the forward, ``[B, 1, V]``."""
        return logits

    def run(self, graph: StepGraph) -> Changes:
        if self.draws or self.follows_drafts:
            return super().run(graph)
        slots, start = graph.values["slots"], graph.anchors.start
        state = [graph.state(name) for name in ("tokens", "length", "limit")]
        sizes = {"draft_len": self.draft_len, "max_len": self.max_len(graph)}
        token, position, lens = graph.insert(form_of(newest_tokens, graph.facts), *state, slots, before=start, **sizes)
        ids = self.token_ids(graph)
        chosen = graph.insert(torch.ops.speccompile.choose, self.logits(graph, token, position), before=start)
        chosen = chosen if ids is None else graph.insert(to_target_ids, chosen, ids, before=start)
        set_drafts(graph, graph.insert(chosen_drafts, lens, chosen, before=start), lens)
        return Changes(1, self.what(graph))

    def forward(self, graph: StepGraph) -> Forward:
        of_all: list[fx.Node] = []

        def forward(token: fx.Node, position: fx.Node, place: int) -> fx.Node:
            if place == 0:
                of_all.append(self.logits(graph, token, position))
            logits: fx.Node = graph.insert(at_place, of_all[0], before=graph.anchors.start, place=place)
            return self.after_token(graph, logits, token, place)

        return forward


@dataclass(frozen=True)
class DraftByMasks(DraftAtOnce):
    """Draft with one causal forward of a language model over the newest token and mask tokens.

    Source: An et al., "PARD: Accelerating LLM Inference with Low-Cost PARallel Draft Model Adaptation" (2025). All mask
    tokens are the same token. The logits at a token predict the token after it.
    """

    mask_token_id: int = field(kw_only=True)

    name: ClassVar[str] = "draft_by_masks"
    looks_for: ClassVar[str] = "the mode's network"

    def logits(self, graph: StepGraph, token: fx.Node, position: fx.Node) -> fx.Node:
        start, sizes = graph.anchors.start, {"count": self.draft_len - 1, "mask_token_id": self.mask_token_id}
        tokens, positions = graph.insert(with_masks, token, position, before=start, **sizes)
        return forward_model(graph, tokens, positions, graph.values["slots"], before=start)

    def what(self, graph: StepGraph) -> str:
        return f"one forward of {len(drafter_of(graph).anchors.layers)} layers over {self.draft_len - 1} mask tokens"


def with_masks(
    token: torch.Tensor, position: torch.Tensor, *, count: int, mask_token_id: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """``token`` ``[B, 1]`` followed by mask tokens, ``[B, 1 + count]``, and their positions from ``position`` ``[B,
    1]`` on."""
    masks = token.new_full((token.shape[0], count), mask_token_id)
    return torch.cat([token, masks], dim=1), position + torch.arange(count + 1, device=position.device)


def at_place(logits: torch.Tensor, *, place: int) -> torch.Tensor:
    """The logits ``[B, 1, V]`` of one draft, of ``[B, K, V]``."""
    return logits[:, place : place + 1]


def chosen_drafts(lens: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
    """``chosen`` ``[B, K]`` as drafts ``[B, K]``: -1 after a row's draft length."""
    return cut_drafts(chosen.clamp(min=0), lens, 0)


def to_target_ids(chosen: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """The target's ids of the tokens ``chosen`` ``[B, K]``, which are places in ``ids`` ``[Vd]``."""
    return ids[chosen.clamp(min=0)]

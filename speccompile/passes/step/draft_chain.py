"""Sequential drafting: K forwards of one token a row, each from what the one before it chose."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import fx

from speccompile.graph.step_graph import StepGraph
from speccompile.passes.base import Changes, Facts, Pass, facts
from speccompile.passes.step.drafts import set_drafts, useful_lens
from speccompile.passes.step.sample import draw, probabilities, process, put_tokens

#: Token ``[B, 1]``, its position ``[B, 1]`` and its place in the draft to logits ``[B, 1, V]``, or of a part of the
#: vocabulary, see :meth:`DraftChain.token_ids`.
Forward = Callable[[fx.Node, fx.Node, int], fx.Node]


@dataclass(frozen=True)
class DraftChain(Pass):
    """``draft_len`` forwards of one token a row in front of the target, whose tokens are the step's drafts. A drafter
    is a subclass that says what its :meth:`forward` is.

    With ``draws`` logits go through the request's own pipeline, and the target's noise of the place is added: the
    drafter draws what the target would, as far as both agree. With ``probabilities`` it draws with noise of its own,
    which does not come back in the next step, and leaves what it drew from, ``draft_probs`` ``[B, K, V]``.
    """

    draft_len: int
    draws: bool = False
    probabilities: bool = False

    requires: ClassVar[Facts] = facts("outlined", "rows")
    provides: ClassVar[Facts] = facts("drafts")

    @abstractmethod
    def forward(self, graph: StepGraph) -> Forward:
        """What inserts the drafter's ops for one place in front of ``graph.anchors.start``."""

    def token_ids(self, graph: StepGraph) -> fx.Node | None:
        """The target's ids ``[Vd]`` of the tokens that logits are about; None is all of them."""
        return None

    @abstractmethod
    def what(self, graph: StepGraph) -> str:
        """For people: what has been put in."""

    def max_len(self, graph: StepGraph) -> int:
        """Of the drafter; rows whose drafts would reach it have fewer, or none."""
        return graph.layout.max_len

    def run(self, graph: StepGraph) -> Changes:
        forward, slots, start = self.forward(graph), graph.values["slots"], graph.anchors.start
        ids = self.token_ids(graph)
        state = [graph.state(name) for name in ("tokens", "length", "limit")]
        sizes = {"draft_len": self.draft_len, "max_len": self.max_len(graph)}
        token, position, lens = graph.insert(newest, *state, slots, before=start, **sizes)
        drafted, drawn_from = [], []
        if self.draws:
            context, length = graph.insert(text_so_far, *state[:2], slots, before=start)
            begun = length
        for place in range(self.draft_len):
            logits = forward(token, position, place)
            if self.draws:
                logits = process(graph, logits, context, length, start, drafted=place)
                if self.probabilities:
                    nodes = (logits, graph.state("temperature"), slots)
                    drawn_from.append(graph.insert(slot_probabilities, *nodes, before=start))
                noise = [graph.state(name) for name in ("temperature", "seed")]
                own = [begun] if self.probabilities else []
                drawn = graph.insert(draw, logits, length, slots, *noise, *own, before=start)
            else:
                drawn = graph.insert(torch.ops.speccompile.choose, logits, before=start)
                drawn = drawn if ids is None else graph.insert(of_part, drawn, ids, before=start)
            token, position = graph.insert(go_on, drawn, position, before=start)
            if self.draws:
                context, length = graph.insert(lengthened, context, length, token, before=start)
            drafted.append(token)
        if drawn_from:
            graph.name_value("draft_probs", graph.insert(side_by_side, *drawn_from, before=start))
        set_drafts(graph, graph.insert(join, lens, *drafted, before=start), lens)
        return Changes(self.draft_len, self.what(graph))


def newest(
    tokens: torch.Tensor,
    length: torch.Tensor,
    limit: torch.Tensor,
    slots: torch.Tensor,
    *,
    draft_len: int,
    max_len: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The newest committed token ``[B, 1]``, its position ``[B, 1]``, and the rows' draft lengths ``[B]``."""
    row_length = length[slots]
    position = (row_length - 1).clamp(min=0)
    longest = (max_len - 1 - row_length).clamp(min=0, max=draft_len)
    lens = useful_lens(longest, row_length, limit[slots])
    return tokens[slots, position][:, None], position[:, None], lens


def of_part(chosen: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """The tokens that are chosen ``[B, 1]`` as places in ``ids`` ``[Vd]``."""
    return ids[chosen.clamp(min=0)]


def go_on(drawn: torch.Tensor, position: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The next token ``[B, 1]``, which is any where none could be ``drawn``, and its position."""
    return drawn.clamp(min=0), position + 1


def text_so_far(tokens: torch.Tensor, length: torch.Tensor, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Each row's text ``[B, S]`` and its length ``[B]``."""
    return tokens[slots], length[slots]


def lengthened(
    context: torch.Tensor, row_length: torch.Tensor, token: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The text with one more token ``[B, 1]``, and its length."""
    return put_tokens(context, row_length, token), row_length + 1


def slot_probabilities(scores: torch.Tensor, temperature: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    return probabilities(scores, temperature[slots])


def side_by_side(*places: torch.Tensor) -> torch.Tensor:
    """Of ``[B, T, ...]`` each all places, as of K of ``[B, 1, V]`` ``[B, K, V]``."""
    return torch.cat(places, dim=1)


def join(lens: torch.Tensor, *drafted: torch.Tensor) -> torch.Tensor:
    """K tokens ``[B, 1]`` as drafts ``[B, K]``, -1 behind a row's own draft length."""
    offsets = torch.arange(len(drafted), device=lens.device)
    return torch.where(offsets < lens[:, None], torch.cat(drafted, dim=1), -1)

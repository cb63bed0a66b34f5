"""Early exit: the target's own first layers, final norm and lm_head draft for the rest of it.

After Elhoushi et al., "LayerSkip" (2024). The drafter is cut from the captured graph by a pass; it shares weights and
the KV of its layers with the target, so it has no state to keep warm: the verify of every tier, K=0 included,
writes the KV that the next draft reads.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from speccompile.errors import InvalidOption
from speccompile.graph_capture.graph import StepGraph
from speccompile.graph_capture.support import ModelInfo
from speccompile.modes.base import Mode
from speccompile.passes.base import Changes, Facts, Pass, facts
from speccompile.passes.drafts import set_drafts, useful_lens
from speccompile.passes.sample import draw, probabilities, process, put_tokens


@dataclass(frozen=True)
class EarlyExit(Mode):
    """Drafts with the target's first ``exit_layer`` decoder layers.

    Args:
        exit_layer: E, between 1 and L; E = L drafts with the whole target.
    """

    exit_layer: int = 1

    name: ClassVar[str] = "early_exit"
    draft_probs: ClassVar[bool] = True

    def check(self, info: ModelInfo) -> None:
        good = isinstance(self.exit_layer, int) and 1 <= self.exit_layer <= info.num_layers
        if not good or isinstance(self.exit_layer, bool):
            raise InvalidOption(
                where="mode 'early_exit'",
                name="exit_layer",
                value=self.exit_layer,
                reason=f"it has to lie in 1 .. {info.num_layers}, the target's decoder layers",
            )

    def draft_passes(self, draft_len: int) -> list[Pass]:
        return [DraftEarlyExit(self.exit_layer, draft_len)]

    def sampled_draft_passes(self, draft_len: int, *, probabilities: bool) -> list[Pass]:
        return [DraftEarlyExit(self.exit_layer, draft_len, draws=True, probabilities=probabilities)]

    def explain(self) -> str:
        return f"the target's first {self.exit_layer} layers draft, sharing their KV"


@dataclass(frozen=True)
class DraftEarlyExit(Pass):
    """Splices ``draft_len`` single-token forwards of the first ``exit_layer`` layers in front of the target.

    With ``draws`` their logits go through the request's own pipeline, and the target's noise of the place is added: the
    drafter draws what the target would, as far as both agree. With ``probabilities`` it draws with noise of its own,
    which does not come back in the next step, and leaves what it drew from, ``draft_probs`` ``[B, K, V]``.
    """

    exit_layer: int
    draft_len: int
    draws: bool = False
    probabilities: bool = False

    name: ClassVar[str] = "draft_early_exit"
    looks_for: ClassVar[str] = "decoder layers to copy"
    requires: ClassVar[Facts] = facts("outlined", "rows")
    provides: ClassVar[Facts] = facts("drafts")

    def run(self, graph: StepGraph) -> Changes:
        anchors, slots, start = graph.anchors, graph.values["slots"], graph.anchors.start
        # The target of a mixed step has rows that nobody drafts for.
        target_slots = graph.values.get("target_slots", slots)
        state = [graph.state(name) for name in ("tokens", "length", "limit")]
        token, position, lens = graph.insert(newest, *state, slots, before=start, draft_len=self.draft_len)
        drafted, drawn_from = [], []
        if self.draws:
            context, length = graph.insert(text_so_far, *state[:2], slots, before=start)
            begun = length
        for place in range(self.draft_len):
            inputs = {anchors.tokens: token, anchors.positions: position, target_slots: slots}
            hidden = graph.splice(anchors.layers[self.exit_layer - 1], inputs, before=start)
            logits = graph.splice(graph.values["logits"], {**inputs, anchors.layers[-1]: hidden}, before=start)
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
            token, position = graph.insert(go_on, drawn, position, before=start)
            if self.draws:
                context, length = graph.insert(lengthened, context, length, token, before=start)
            drafted.append(token)
        if drawn_from:
            graph.name_value("draft_probs", graph.insert(side_by_side, *drawn_from, before=start))
        set_drafts(graph, graph.insert(join, lens, *drafted, before=start), lens)
        return Changes(self.draft_len, f"{self.draft_len} forwards of {self.exit_layer} layers")


def newest(
    tokens: torch.Tensor, length: torch.Tensor, limit: torch.Tensor, slots: torch.Tensor, *, draft_len: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The newest committed token ``[B, 1]``, its position ``[B, 1]``, and the rows' draft lengths ``[B]``."""
    row_length = length[slots]
    position = (row_length - 1).clamp(min=0)
    lens = useful_lens(torch.full_like(row_length, draft_len), row_length, limit[slots])
    return tokens[slots, position][:, None], position[:, None], lens


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
    """K of ``[B, 1, V]`` as ``[B, K, V]``."""
    return torch.cat(places, dim=1)


def join(lens: torch.Tensor, *drafted: torch.Tensor) -> torch.Tensor:
    """K tokens ``[B, 1]`` as drafts ``[B, K]``, -1 behind a row's own draft length."""
    offsets = torch.arange(len(drafted), device=lens.device)
    return torch.where(offsets < lens[:, None], torch.cat(drafted, dim=1), -1)

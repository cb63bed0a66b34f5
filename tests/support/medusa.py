"""A mode as a user writes it: Medusa heads over what the target's lm_head reads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from transformers import PreTrainedModel

from speccompile.graph.state import StateSpec
from speccompile.graph.step_graph import StepGraph
from speccompile.modes.base import Mode, proposal_state
from speccompile.passes.base import Changes, Facts, Pass, facts
from speccompile.passes.step.drafts import ReadDrafts, useful_lens
from speccompile.passes.step.tap_hidden import LowerTaps, MarkTaps, Tap


def drafts_of(hidden: torch.Tensor, heads: torch.Tensor) -> torch.Tensor:
    """Draft tokens ``[B, heads]`` of the last hidden state that the target has read, ``[B, M]``, by linear heads
    ``[heads, V, M]``: head k says what comes k + 2 places after it, since the place after it is known."""
    return torch.einsum("bm,kvm->bkv", hidden, heads).argmax(-1)


@dataclass(frozen=True)
class ProposeByHeads(Pass):
    heads: torch.Tensor

    name: ClassVar[str] = "propose_by_heads"
    looks_for: ClassVar[str] = "tapped hidden states"
    requires: ClassVar[Facts] = facts("target_inputs", "committed", "tapped")
    provides: ClassVar[Facts] = facts("proposed")

    def run(self, graph: StepGraph) -> Changes:
        state = [graph.state(name) for name in ("length", "limit", "draft_tokens", "draft_lens")]
        values = [graph.values[name] for name in ("slots", "positions", "tapped")]
        graph.insert(propose_by_heads, *state, *values, graph.constant("medusa_heads", self.heads))
        return Changes(1)


def propose_by_heads(
    length: torch.Tensor,
    limit: torch.Tensor,
    draft_tokens: torch.Tensor,
    draft_lens: torch.Tensor,
    slots: torch.Tensor,
    positions: torch.Tensor,
    tapped: torch.Tensor,
    heads: torch.Tensor,
) -> None:
    """Of a mixed step the first B rows alone belong to requests that decode."""
    rows = slots.shape[0]
    last = (length[slots] - 2 - positions[:rows, 0]).clamp(0, tapped.shape[1] - 1)
    hidden = tapped[torch.arange(rows, device=slots.device), last]
    draft_tokens.index_put_((slots,), drafts_of(hidden, heads))
    full = torch.full_like(slots, heads.shape[0])
    draft_lens.index_put_((slots,), useful_lens(full, length[slots], limit[slots]))


@dataclass(frozen=True)
class Medusa(Mode):
    """Args:
    heads: float32 ``[Kmax, V, M]``.
    """

    heads: torch.Tensor | None = None

    name: ClassVar[str] = "medusa"
    ready: ClassVar[bool] = True
    goals: ClassVar[Facts] = facts("proposed")

    def state(self) -> list[StateSpec]:
        return proposal_state()

    def draft_passes(self, draft_len: int) -> list[Pass]:
        return [ReadDrafts(draft_len)]

    def mark_passes(self) -> list[Pass]:
        return [MarkTaps((Tap(-1, post_norm=True),))]

    def commit_passes(self) -> list[Pass]:
        assert self.heads is not None
        return [LowerTaps(), ProposeByHeads(self.heads)]

    def explain(self) -> str:
        return "linear heads over the hidden state behind the final norm"


def fitted_heads(model: PreTrainedModel, texts: Sequence[Sequence[int]], count: int) -> torch.Tensor:
    """Heads that are right at most places of these texts (by least squares), ``[count, V, M]``."""
    heads = []
    with torch.no_grad():
        # transformers' last hidden state is that behind the final norm.
        states = [model(torch.tensor([text]), output_hidden_states=True).hidden_states[-1][0] for text in texts]
    for ahead in range(2, count + 2):
        inputs = torch.cat([state[:-ahead] for state in states])
        wanted = torch.cat([torch.tensor(text[ahead:]) for text in texts])
        one_hot = torch.nn.functional.one_hot(wanted, model.config.vocab_size).float()
        heads.append(torch.linalg.lstsq(inputs, one_hot).solution.T)
    return torch.stack(heads)

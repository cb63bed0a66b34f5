"""Training of heads that draft in a chain: several consecutive draft steps, each on the head's own outputs.

Source: Li et al., "EAGLE-3" (2025), section 3.2, "training-time test"; weights of steps as in SpecForge.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

import torch
from torch import nn
from torch.nn import functional as F

from speccompile.modes.network.draft_head import RowAttention
from speccompile.training.acceptance import REPORTED, DraftCounts
from speccompile.training.draft_vocab import TargetOverDrafts
from speccompile.training.frozen import leave_out_frozen
from speccompile.training.losses import cross_entropy, less_memory
from speccompile.training.teacher import Teacher
from speccompile.training.unrolled_attention import UnrolledAttention


class ChainHead(Protocol):
    """Parts of a head's ``forward`` that unrolling needs."""

    def fuse(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Convert the target's hidden states to the input of the first draft step."""

    def read(
        self, input_ids: torch.Tensor, position_ids: torch.Tensor, hidden: torch.Tensor, cache: RowAttention
    ) -> torch.Tensor:
        """Run one draft step over all rows; returns its hidden states."""

    def carry(self, hidden: torch.Tensor) -> torch.Tensor:
        """Convert the hidden states of a draft step to the input of the next step."""

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Scores of the tokens that the head can draft."""


class UnrolledTraining(nn.Module):
    """Module of a head and its loss.

    Row t reads the target's hidden states at t and the token at t + 1, and drafts the token at t + 2. In step s it
    reads its output of step s - 1 and the token at t + 1 + s, and drafts the token at t + 2 + s. The loss of a step is
    the cross entropy with the target's distribution over the draft vocabulary, at positions whose target choice is in
    that vocabulary. Steps have the weights 1, decay, decay^2, ...

    Args:
        head: a module that is a :class:`ChainHead`. Parameters without gradient are not in the state dict.
        teacher: computes hidden states that are missing in a batch.
        ids: int64 ``[Vd]``, the target's ids of the draft tokens.
        unroll: number of draft steps to train. Evaluations also judge
            :data:`~speccompile.training.acceptance.REPORTED`.
    """

    def __init__(self, head: nn.Module, teacher: Teacher, ids: torch.Tensor, *, unroll: int, decay: float) -> None:
        super().__init__()
        self.head: Any = head
        self._teacher, self._unroll, self._decay = teacher, unroll, decay
        self.targets = TargetOverDrafts(teacher, ids)
        leave_out_frozen(self)

    def forward(
        self,
        input_ids: torch.Tensor,
        loss_mask: torch.Tensor,
        texts: torch.Tensor | None = None,
        tapped: torch.Tensor | None = None,
        final: torch.Tensor | None = None,
        choices: torch.Tensor | None = None,
    ) -> dict[str, torch.Tensor]:
        """Compute the loss of a batch, see :class:`~speccompile.training.batches.Batches`.

        Returns:
            ``loss``, and in eval mode ``counts`` int64 ``[1, 2, K]``, numbers of accepted and judged drafts by
            position.
        """
        states = self._teacher.states(input_ids, tapped, final, choices)
        steps = self._unroll if self.training else max(self._unroll, *REPORTED)
        probs, place = self._target_probs(states.final, later(loss_mask, 1))
        rows = later(loss_mask, 1)
        counts = DraftCounts()
        loss = torch.zeros((), device=input_ids.device)
        tapped = states.tapped.to(self.targets.weight.dtype)
        for step, left in enumerate(unrolled(self.head, input_ids, tapped, steps)):
            rows = rows & later(loss_mask, step + 2)
            chosen, text = later(states.choices, step + 1), later(input_ids, step + 2)
            learnt = self.targets.draft_ids[chosen[rows]] >= 0
            wanted = later(place, step + 1)[rows][learnt]
            if self.training:
                own = less_memory(self._loss, left[rows], learnt, probs, wanted, columns=len(self.targets.ids))
                loss = loss + self._decay**step * own
            else:
                logits = self.head.logits(left[rows]).float()
                if step < self._unroll:
                    loss = loss + self._decay**step * cross_entropy(logits[learnt], probs[wanted])
                drafts = torch.full_like(chosen, -1)
                drafts[rows] = self.targets.ids[logits.argmax(-1)]
                counts.add(rows, drafts, chosen, text)
        return {"loss": loss} if self.training else {"loss": loss, "counts": counts.total()[None]}

    def _loss(
        self, left: torch.Tensor, learnt: torch.Tensor, probs: torch.Tensor, wanted: torch.Tensor
    ) -> torch.Tensor:
        """Loss of the rows of ``left`` ``[R, H]`` that are ``learnt`` (bool ``[R]``). Their distributions are the rows
        ``wanted`` of ``probs``."""
        logits = self.head.logits(left).float()
        return cross_entropy(logits[learnt], probs[wanted])

    @torch.no_grad()
    def _target_probs(self, final: torch.Tensor, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The target's distributions over the draft vocabulary after the positions ``rows`` (bool ``[B, T]``), float32
        ``[R, Vd]``, and the index of each position's distribution, int64 ``[B, T]``."""
        return self.targets.probs(final[rows]), (rows.flatten().cumsum(0) - 1).view_as(rows)


def unrolled(
    head: ChainHead, input_ids: torch.Tensor, hidden_states: torch.Tensor, steps: int
) -> Iterator[torch.Tensor]:
    """Yield the output of the head's layers in each step, ``[B, T, H]``. Row t of step s reads the token at t + 1 + s.

    Args:
        input_ids: int64 ``[B, T]``.
        hidden_states: ``[B, T, taps * M]``.
    """
    attention = UnrolledAttention()
    positions = torch.arange(input_ids.shape[1], device=input_ids.device).expand_as(input_ids)
    hidden = head.fuse(hidden_states)
    for step in range(steps):
        left = head.read(later(input_ids, step + 1), positions + step, hidden, attention)
        yield left
        hidden = head.carry(left)


def later(x: torch.Tensor, count: int) -> torch.Tensor:
    """Shift ``x`` ``[B, T]`` left by ``count`` positions, with zeros at the end."""
    return F.pad(x[:, count:], (0, min(count, x.shape[1])))

"""Draft vocabulary: the tokens that a head can draft, and the target's distributions over them."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn
from torch.nn import functional as F

from speccompile.training.teacher import Teacher

#: Default size, and the smallest target vocabulary for which it is used.
DEFAULT_SIZE, SMALLEST_TARGET = 8192, 16384


def default_size(vocab: int) -> int:
    """Default size for a target vocabulary of ``vocab`` tokens."""
    return DEFAULT_SIZE if vocab > SMALLEST_TARGET else vocab


def most_frequent(counts: torch.Tensor, size: int, always: Iterable[int] = ()) -> torch.Tensor:
    """Ids of the ``size`` most frequent tokens of the target, int64 ``[size]``, ascending. Among equally frequent
    tokens smaller ids have precedence.

    Args:
        counts: int64 ``[V]``.
        always: ids that are included regardless of their counts.
    """
    counts = counts.clone()
    known = [token for token in always if 0 <= token < len(counts)]
    counts[known] = counts.max() + 1
    return counts.sort(descending=True, stable=True).indices[:size].sort().values


class TargetOverDrafts(nn.Module):
    """The target's lm_head over a draft vocabulary.

    Args:
        ids: int64 ``[Vd]``, the target's ids of the draft tokens.

    Attributes:
        draft_ids: int64 ``[V]``, the draft token of each token of the target, or -1.
        weight: float32 ``[Vd, M]``; bias: ``[Vd]``, or None.
    """

    ids: torch.Tensor
    draft_ids: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor | None

    def __init__(self, teacher: Teacher, ids: torch.Tensor) -> None:
        super().__init__()
        self._teacher, device = teacher, teacher.weight.device
        ids = ids.to(device)
        draft_ids = torch.full((teacher.weight.shape[0],), -1, device=device)
        draft_ids[ids] = torch.arange(len(ids), device=device)
        rows = slice(None) if len(ids) == len(teacher.weight) else ids
        bias = None if teacher.bias is None else teacher.bias[rows].float()
        buffers = {"ids": ids, "draft_ids": draft_ids, "weight": teacher.weight[rows].float(), "bias": bias}
        for name, value in buffers.items():
            self.register_buffer(name, value, persistent=False)

    @torch.no_grad()
    def probs(self, final: torch.Tensor) -> torch.Tensor:
        """Distributions, float32 ``[R, Vd]``, for final hidden states ``[R, M]``."""
        with torch.autocast(final.device.type, enabled=False):
            return self._teacher.after(F.linear(final.float(), self.weight, self.bias)).softmax(-1)

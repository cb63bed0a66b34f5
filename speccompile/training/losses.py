"""Losses over the logits of many rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import torch
from torch.utils.checkpoint import checkpoint

#: Largest number of columns for which logits are kept for the backward pass.
WIDE = 2**14


def cross_entropy(logits: torch.Tensor, probs: torch.Tensor) -> torch.Tensor:
    """Mean cross entropy over rows ``[R, V]``; 0 without rows."""
    losses = logits.logsumexp(-1) - (probs * logits).sum(-1)
    return losses.sum() / max(len(losses), 1)


def less_memory(loss: Callable[..., torch.Tensor], *args: torch.Tensor, columns: int) -> torch.Tensor:
    """Compute ``loss(*args)``. With more than :data:`WIDE` columns, the backward pass computes the logits again: those
    of several draft steps would need much memory."""
    if columns <= WIDE or not torch.is_grad_enabled():
        return loss(*args)
    return cast(torch.Tensor, checkpoint(loss, *args, use_reentrant=False, preserve_rng_state=False))

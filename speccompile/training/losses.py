"""Losses over the logits of many rows, and their weights."""

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


def total_variation(logits: torch.Tensor, probs: torch.Tensor) -> torch.Tensor:
    """Total variation ``[R]`` between the distributions of logits and ``probs``, ``[R, V]``: 1 minus the probability
    that rejection sampling accepts a draft."""
    return (logits.softmax(-1) - probs).abs().sum(-1) / 2


def pace_weights(divergence: torch.Tensor, judged: torch.Tensor, *, smoothing: float = 0.5) -> torch.Tensor:
    """Weights of the losses of a block's drafts: of each draft, the expected number of drafts that are accepted from it
    on, by smoothed chances. A draft that is rarely reached has a small weight.

    Source: "D-PACE" (2026, arXiv 2605.18810); speculators, ``dpace_loss_decay`` of ``losses/utils.py``. There a chance
    is exp of the negative cross entropy with one token; here of the divergence, since the target's distributions have
    an entropy, whatever the draft is.

    Args:
        divergence: float ``[..., K]``, Kullback-Leibler divergence of each draft's distribution from the target's.
        judged: bool ``[..., K]``; other drafts have the weight 0.
        smoothing: share of a chance of 1 in each chance.

    Returns:
        Without gradient, ``[..., K]``.
    """
    chances = (1 - smoothing) * divergence.detach().neg().exp() + smoothing
    reached = torch.where(judged, chances, 1.0).cumprod(-1) * judged
    return reached.flip(-1).cumsum(-1).flip(-1) * judged


def less_memory(loss: Callable[..., torch.Tensor], *args: torch.Tensor, columns: int) -> torch.Tensor:
    """Compute ``loss(*args)``. With more than :data:`WIDE` columns, the backward pass computes the logits again: those
    of several draft steps would need much memory."""
    if columns <= WIDE or not torch.is_grad_enabled():
        return loss(*args)
    return cast(torch.Tensor, checkpoint(loss, *args, use_reentrant=False, preserve_rng_state=False))

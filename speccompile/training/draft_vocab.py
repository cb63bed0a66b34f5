"""Draft vocabulary: the tokens that a head can draft."""

from __future__ import annotations

from collections.abc import Iterable

import torch

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

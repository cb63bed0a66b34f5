"""The draft vocabulary: the tokens that a head can draft."""

from __future__ import annotations

from collections.abc import Iterable

import torch

#: Size by default, and that of the smallest target's vocabulary that gets one of this size.
DEFAULT_SIZE, SMALLEST_TARGET = 8192, 16384


def default_size(vocab: int) -> int:
    """Of a target's vocabulary of that size."""
    return DEFAULT_SIZE if vocab > SMALLEST_TARGET else vocab


def most_frequent(counts: torch.Tensor, size: int, always: Iterable[int] = ()) -> torch.Tensor:
    """The target's ids of the ``size`` most frequent tokens, int64 ``[size]``, ascending. Of equally frequent ones the
    first are taken.

    Args:
        counts: int64 ``[V]``.
        always: ids that are taken however rare they are.
    """
    counts = counts.clone()
    known = [token for token in always if 0 <= token < len(counts)]
    counts[known] = counts.max() + 1
    return counts.sort(descending=True, stable=True).indices[:size].sort().values

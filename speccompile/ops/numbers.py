"""Numbers that are known before any step, as tensors: a step holds no constants."""

from __future__ import annotations

from collections.abc import Sequence

import torch

#: Values up to which :func:`numbers` has an op for each.
SINGLE_VALUES = 12


def numbers(values: Sequence[int], device: torch.device) -> torch.Tensor:
    """int64 ``[n]``, as ops: a step holds no constants.

    One op for each value is a kernel launch for each node of a tree. More than ``SINGLE_VALUES`` share a few int64,
    from which one shift unpacks them.
    """
    if len(values) <= SINGLE_VALUES:
        return torch.cat([torch.full((1,), value, device=device) for value in values])
    low = min(values)
    bits = max(1, (max(values) - low).bit_length())
    per_word = 63 // bits
    words = [
        sum(value - low << index * bits for index, value in enumerate(values[first : first + per_word]))
        for first in range(0, len(values), per_word)
    ]
    packed = torch.cat([torch.full((1, 1), word, device=device) for word in words])
    shifts = torch.arange(0, per_word * bits, bits, device=device)
    found = (packed >> shifts & (1 << bits) - 1).flatten()[: len(values)]
    return found + low if low else found

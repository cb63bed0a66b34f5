"""E2M1, floating point of four bits, as integers: its values, doubled.

Source: OCP Microscaling Formats 1.0, section 5.3.3.
"""

from __future__ import annotations

import torch

#: The numbers that four bits stand for: values of E2M1, doubled. Bit 3 is the sign.
NUMBERS = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)


def is_fp4(numbers: torch.Tensor) -> bool:
    """Whether all integers, int8, are among :data:`NUMBERS`."""
    counts = torch.bincount(numbers.flatten().view(torch.uint8), minlength=256)
    return int(counts[[number % 256 for number in set(NUMBERS)]].sum()) == numbers.numel()


def encode(numbers: torch.Tensor) -> torch.Tensor:
    """The four bits of integers among :data:`NUMBERS`, int8."""
    size = numbers.abs()
    return torch.where(size <= 4, size, (size // 2 + 2).clamp_(max=7)).add_((numbers < 0).to(torch.int8), alpha=8)


def decode(bits: torch.Tensor) -> torch.Tensor:
    """The integers, int8, that four bits stand for."""
    code = bits & 7
    size = torch.where(code <= 4, code, 2 * code - 4).add_((code == 7).to(torch.int8), alpha=2)
    return torch.where(bits > 7, -size, size)

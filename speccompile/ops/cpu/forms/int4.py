"""Four bits, in groups of 32 inputs with a float16 scale. Source: llama.cpp's Q4_0."""

from __future__ import annotations

import torch
import torch.nn.functional as F

import speccompile.ops.native  # noqa: F401  defines the ops
from speccompile.ops.cpu.forms.base import COLUMNS, Form, ceil_to, whole_columns
from speccompile.ops.cpu.forms.int8 import GROUP as INPUT_GROUP
from speccompile.ops.cpu.forms.scales import has_minimums, pack_scales, scaled

ops = torch.ops.speccompile

#: Inputs that share a scale.
GROUP = 32
#: What is added to a number, which then has no sign.
OFFSET = 8


def quantise_int4(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """``[N, K]`` in groups of 32 along K: int8 of -8 to 7, ``[N, G, 32]``, and float16 scales ``[N, G]``, of any sign.

    The value of a group that has the greatest size becomes -8. G is even, since inputs have groups of 64.
    """
    groups = F.pad(values.float(), (0, -values.shape[1] % INPUT_GROUP)).unflatten(1, (-1, GROUP))
    greatest = groups.gather(-1, groups.abs().argmax(-1, keepdim=True))[..., 0]
    largest = torch.finfo(torch.float16).max
    scales = (greatest / -OFFSET).clamp(-largest, largest).to(torch.float16)
    factor = 1 / scales.float()
    # Of zeros, of what float16 takes for zero, and of what is not a number.
    factor = torch.where(factor.isfinite(), factor, 0)
    return (groups * factor[..., None]).round().clamp(-OFFSET, OFFSET - 1).to(torch.int8), scales


def pack_nibbles(numbers: torch.Tensor) -> torch.Tensor:
    """Numbers of 0 to 15, ``[N, K]``, N a multiple of 32 and K of 64, to uint8 ``[N / 32, K / 4, 16, 4]``. A byte has a
    number of columns 0 to 15 in its low half, of 16 to 31 in its high half."""
    steps = numbers.to(torch.uint8).unflatten(1, (-1, 4)).unflatten(0, (-1, 2, COLUMNS // 2))
    return (steps[:, 0] | steps[:, 1] << 4).transpose(1, 2).contiguous()


def unpack_int4(packed: torch.Tensor, scales: torch.Tensor, features: int, depth: int) -> torch.Tensor:
    """The weight, float32 ``[features, depth]``. With minimums, numbers have no offset."""
    numbers = torch.cat((packed & 15, packed >> 4), 2).to(torch.int8)
    numbers = numbers.transpose(1, 2).flatten(2).flatten(0, 1)
    return scaled(numbers if has_minimums(scales) else numbers - OFFSET, scales)[:features, :depth]


class Int4(Form):
    """Weights as int4 with a scale for each group of 32 columns."""

    name = "int4"
    tensors = ("int4", "scales")
    linear, linears = ops.int4_linear.default, ops.int4_linears.default
    embedding = ops.int4_embedding.default
    rounds = True
    description = "rounded to int4 in groups of 32"

    def pack(self, weight: torch.Tensor) -> tuple[torch.Tensor, ...]:
        numbers, scales = quantise_int4(whole_columns(weight))
        return pack_nibbles(numbers.flatten(1) + OFFSET), pack_scales(scales)

    def unpack(self, packed: tuple[torch.Tensor, ...], features: int, depth: int) -> torch.Tensor:
        numbers, scales = packed
        return unpack_int4(numbers, scales, features, depth)

    def holds(self, weight: torch.Tensor, packed: tuple[torch.Tensor, ...]) -> bool:
        # Of a group's greatest value, each number is off by a sixteenth at most: a third of the group's length.
        difference = self.unpack(packed, *weight.shape) - weight
        return float(difference.norm()) <= 0.5 * float(weight.float().norm())

    def nbytes(self, features: int, depth: int, itemsize: int) -> int:
        return ceil_to(features, COLUMNS) * ceil_to(depth, INPUT_GROUP) // GROUP * (GROUP // 2 + 2)

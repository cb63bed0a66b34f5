"""Four bits, in groups of 32 inputs with a float16 scale. Source: llama.cpp's Q4_0."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F

import speccompile.ops.native  # noqa: F401  defines the ops
from speccompile.ops.cpu.forms.base import COLUMNS, Form, ceil_to, pack_by_rows, whole_columns
from speccompile.ops.cpu.forms.int8 import GROUP as INPUT_GROUP
from speccompile.ops.cpu.forms.scales import has_minimums, pack_scales, scaled

ops = torch.ops.speccompile

#: Inputs that share a scale.
GROUP = 32
#: The summand that removes the sign of a number.
OFFSET = 8
#: Scales that :func:`search_int4` begins with, as multiples of the scale that maps a group's greatest value to -8.
#: Those below zero map it to 7 or 8.
SHARES = (1.0, 0.92, 0.85, -1.0, -1.12)
#: Rows of a weight that are searched at a time: few enough that intermediate results stay in a core's cache.
ROWS = 64


def quantise_int4(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """``[N, K]`` in groups of 32 along K: int8 of -8 to 7, ``[N, G, 32]``, and float16 scales ``[N, G]``, of any sign.

    The value of a group that has the greatest size becomes -8. G is even, since inputs have groups of 64.
    """
    groups = in_groups(values)
    scales = as_scales(_greatest(groups) / -OFFSET)
    return _rounded(groups, scales.float()).to(torch.int8), scales


def search_int4(values: torch.Tensor, importance: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """:func:`quantise_int4` with the scale of each group that loses least, among those that are tried.

    What a group loses is the sum over its inputs of ``importance`` times the squared error: the mean square error of
    its part of the product, if inputs are independent. From each of :data:`SHARES` of the usual scale, numbers are
    rounded, the best scale for these is computed (least squares), and numbers are rounded again by that.

    Args:
        importance: float32 ``[K]``, the mean square of each input.

    Source: llama.cpp's ``make_qx_quants`` and ``imatrix``.
    """
    # An input that was always zero has no measured importance; its weights must not lose all precision.
    importance = importance.float().clamp_min(max(1e-6 * float(importance.mean()), 1e-30))
    costs = in_groups(importance[None])
    numbers, scales = zip(*(_search(in_groups(rows), costs) for rows in values.split(ROWS)), strict=True)
    return torch.cat(numbers), torch.cat(scales)


def _search(groups: torch.Tensor, costs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    usual = _greatest(groups) / -OFFSET
    scales = as_scales(usual).float()
    least = _lost(groups, scales, costs)
    weighted = groups * costs
    for share in SHARES:
        numbers = _rounded(groups, usual * share)
        fitted = (weighted * numbers).sum(-1) / (costs * numbers.square()).sum(-1)
        fitted = as_scales(torch.where(fitted.isfinite(), fitted, 0)).float()
        lost = _lost(groups, fitted, costs)
        scales = torch.where(lost < least, fitted, scales)
        least = torch.minimum(lost, least)
    return _rounded(groups, scales).to(torch.int8), as_scales(scales)


def _lost(groups: torch.Tensor, scales: torch.Tensor, costs: torch.Tensor) -> torch.Tensor:
    return ((_rounded(groups, scales) * scales[..., None] - groups).square() * costs).sum(-1)


def in_groups(values: torch.Tensor) -> torch.Tensor:
    """``[N, K]``, with zeros after K up to a multiple of 64, as float32 ``[N, G, 32]``."""
    return F.pad(values.float(), (0, -values.shape[1] % INPUT_GROUP)).unflatten(1, (-1, GROUP))


def _greatest(groups: torch.Tensor) -> torch.Tensor:
    """The value of the greatest size, with its sign."""
    return groups.gather(-1, groups.abs().argmax(-1, keepdim=True))[..., 0]


def as_scales(values: torch.Tensor) -> torch.Tensor:
    """``values`` in float16, at most its greatest number."""
    largest = torch.finfo(torch.float16).max
    return values.clamp(-largest, largest).to(torch.float16)


def _rounded(groups: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """The numbers of -8 to 7, as floats."""
    factor = 1 / scales
    # The factor is not finite for a scale of 0 (also by underflow in float16) or NaN.
    factor = torch.where(factor.isfinite(), factor, 0)
    return (groups * factor[..., None]).round_().clamp_(-OFFSET, OFFSET - 1)


def pack_nibbles(numbers: torch.Tensor) -> torch.Tensor:
    """Numbers of 0 to 15, ``[N, K]``, N a multiple of 32 and K of 64, to uint8 ``[N / 32, K / 4, 16, 4]``. A byte has a
    number of columns 0 to 15 in its low half, of 16 to 31 in its high half."""
    steps = numbers.to(torch.uint8).unflatten(1, (-1, 4)).unflatten(0, (-1, 2, COLUMNS // 2))
    return (steps[:, 0] | steps[:, 1] << 4).transpose(1, 2).contiguous()


def unpack_nibbles(packed: torch.Tensor) -> torch.Tensor:
    """The numbers of 0 to 15, int8 ``[N, K]``, that :func:`pack_nibbles` received."""
    numbers = torch.cat((packed & 15, packed >> 4), 2).to(torch.int8)
    return numbers.transpose(1, 2).flatten(2).flatten(0, 1)


def unpack_int4(packed: torch.Tensor, scales: torch.Tensor, features: int, depth: int) -> torch.Tensor:
    """The weight, float32 ``[features, depth]``. With minimums, numbers have no offset."""
    numbers = unpack_nibbles(packed)
    return scaled(numbers if has_minimums(scales) else numbers - OFFSET, scales)[:features, :depth]


def _packed(numbers: torch.Tensor, scales: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return pack_nibbles(numbers.flatten(1) + OFFSET), pack_scales(scales)


class Int4(Form):
    """Weights as int4 with a scale for each group of 32 columns."""

    name = "int4"
    tensors = ("int4", "scales")
    linear, linears = ops.int4_linear.default, ops.int4_linears.default
    fused = ops.fused_int4_linears.default
    embedding = ops.int4_embedding.default
    expert_linear = ops.int4_expert_linear.default
    rounds = True
    calibrated = True
    # Of a group's greatest value, each number is off by a sixteenth at most: a third of the group's length.
    allowed = 0.5
    description = "rounded to int4 in groups of 32"

    def pack(self, weight: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return pack_by_rows(weight, lambda rows: _packed(*quantise_int4(rows)))

    def pack_for_inputs(self, weight: torch.Tensor, importance: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return _packed(*search_int4(whole_columns(weight), importance))

    def unpack(self, packed: tuple[torch.Tensor, ...], features: int, depth: int) -> torch.Tensor:
        numbers, scales = packed
        return unpack_int4(numbers, scales, features, depth)

    def distance(self, weight: torch.Tensor, values: torch.Tensor) -> tuple[float, float]:
        # Squares of values of any size are finite as multiples of the greatest one.
        own = weight.float()
        unit = own.abs().max().clamp_min(torch.finfo(torch.float32).tiny)
        return float(((values - own) / unit).norm().double() * unit), float((own / unit).norm().double() * unit)

    def joined(self, one: float, other: float) -> float:
        return math.hypot(one, other)

    def nbytes(self, features: int, depth: int, itemsize: int) -> int:
        return ceil_to(features, COLUMNS) * ceil_to(depth, INPUT_GROUP) // GROUP * (GROUP // 2 + 2)

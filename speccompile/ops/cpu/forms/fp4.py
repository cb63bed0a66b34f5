"""Floating point of four bits (E2M1), in groups of 32 inputs: the values of MXFP4."""

from __future__ import annotations

import torch

import speccompile.ops.native  # noqa: F401  defines the ops
from speccompile.ops.cpu.forms.base import pack_by_rows
from speccompile.ops.cpu.forms.int4 import Int4, as_scales, in_groups, pack_nibbles, unpack_nibbles
from speccompile.ops.cpu.forms.scales import pack_scales, scaled
from speccompile.utils.fp4 import NUMBERS, decode, encode

ops = torch.ops.speccompile

_SIZES = torch.tensor(NUMBERS[:8], dtype=torch.float32)


def quantise_fp4(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """``[N, K]`` in groups of 32 along K, the greatest size of each being 12: numbers ``[N, G, 32]``, int8, and float16
    scales ``[N, G]``. A value between two numbers becomes the nearer one, and the smaller one of two as near."""
    groups = in_groups(values)
    scales = as_scales(groups.abs().amax(-1) / _SIZES[-1])
    factor = 1 / scales.float()
    sizes = groups.abs() * torch.where(factor.isfinite(), factor, 0)[..., None]
    nearest = _SIZES[torch.bucketize(sizes, (_SIZES[1:] + _SIZES[:-1]) / 2)]
    return (nearest * groups.sign()).to(torch.int8), scales


def _packed(numbers: torch.Tensor, scales: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return pack_nibbles(encode(numbers.flatten(1))), pack_scales(scales)


class Fp4(Int4):
    """Weights as E2M1 with a scale for each group of 32 columns. ``wrap`` rounds no weight to it."""

    name = "fp4"
    tensors = ("fp4", "scales")
    linear, linears = ops.fp4_linear.default, ops.fp4_linears.default
    fused = ops.fused_fp4_linears.default
    embedding = ops.fp4_embedding.default
    expert_linear = ops.fp4_expert_linear.default
    calibrated = False
    description = "rounded to fp4 in groups of 32"

    def pack(self, weight: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return pack_by_rows(weight, lambda rows: _packed(*quantise_fp4(rows)))

    def pack_for_inputs(self, weight: torch.Tensor, importance: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return self.pack(weight)

    def unpack(self, packed: tuple[torch.Tensor, ...], features: int, depth: int) -> torch.Tensor:
        bits, scales = packed
        return scaled(decode(unpack_nibbles(bits)), scales)[:features, :depth]

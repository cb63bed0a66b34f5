"""Weights in floating point of four bits (E2M1) with scales of 16 or 32 inputs, as MXFP4 and NVFP4 store them."""

from __future__ import annotations

import torch

from speccompile.quantized.source import TensorSource
from speccompile.quantized.weight import GROUPS, GroupedWeight
from speccompile.utils.fp4 import decode

#: Formats, as :class:`~speccompile.quantized.weight.QuantizedWeights` names them.
MXFP4, NVFP4 = "MXFP4", "NVFP4"
COMPRESSED = ("mxfp4-pack-quantized", "nvfp4-pack-quantized")
FORMATS = (MXFP4, NVFP4, *(f"compressed-tensors {format}" for format in COMPRESSED))
#: Bits of the doubled numbers, -12 to 12.
BITS = 6
#: The exponent of a scale that is not a number, and the exponent of 1.
NAN, BIAS = 255, 127
BYTES = (torch.uint8,)


def powers_of_two(exponents: torch.Tensor, source: TensorSource) -> torch.Tensor:
    """Return scales of E8M0, uint8, as float32.

    Raises:
        DamagedCheckpoint: one is not a number.
    """
    if bool((exponents == NAN).any()):
        raise source.damaged("a scale is not a number")
    return torch.ldexp(torch.ones(exponents.shape), exponents.to(torch.int32) - BIAS)


def fp4_weight(
    packed: torch.Tensor, scales: torch.Tensor, source: TensorSource, experts: int | None = None
) -> GroupedWeight:
    """Return the weight ``scales * values``.

    Args:
        packed: uint8 ``[N, K / 2]``, the first of two inputs in the low half of a byte.
        scales: float32 ``[N, G]``.
        experts: how many matrices these are, one after another.

    Raises:
        DamagedCheckpoint: shapes do not fit one another, or a scale is not finite.
        UnsupportedCheckpoint: kernels do not have the group size.
    """
    fits = packed.dim() == 2 and scales.dim() == 2 and len(packed) == len(scales) and scales.numel() > 0
    inputs = packed.shape[1] * 2 if fits else 0
    if not inputs or inputs % scales.shape[1]:
        shapes = f"values {list(packed.shape)}, scales {list(scales.shape)}"
        raise source.damaged(f"its shapes do not fit one another: {shapes}")
    if not bool(scales.isfinite().all()):
        raise source.damaged("a scale is not a finite number")
    group = inputs // scales.shape[1]
    if group not in GROUPS:
        raise source.unsupported(f"its group size is {group}, and kernels only have {', '.join(map(str, GROUPS))}")
    values = decode(torch.stack((packed & 15, packed >> 4), -1).view(torch.int8)).flatten(1)
    # Values are doubled.
    return GroupedWeight(values, BITS, scales / 2, None, group, experts=experts)

"""Eight bits, in groups of 64 inputs with a float32 scale. Source: llama.cpp's Q8_0, whose groups are of 32."""

from __future__ import annotations

import torch
import torch.nn.functional as F

import speccompile.ops.native  # noqa: F401  defines the ops
from speccompile.ops.cpu.forms.base import COLUMNS, Form, ceil_to, pack_by_rows
from speccompile.ops.cpu.forms.scales import pack_scales, scaled

ops = torch.ops.speccompile

#: Inputs that share a scale.
GROUP = 64


def quantise(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """``[N, K]`` in groups of 64 along K, the greatest of each being 127: int8 ``[N, G, 64]`` and float32 ``[N, G]``.

    The inputs of every rounded form are rounded so, too.
    """
    groups = F.pad(values.float(), (0, -values.shape[1] % GROUP)).unflatten(1, (-1, GROUP))
    most = groups.abs().amax(-1)
    # A number over a tensor is the tensor's reciprocal times the number, in torch: rounded twice.
    factor = torch.full_like(most, 127) / most
    # Neither of zeros, nor of what is so small that its factor is infinite, nor of what is not a number.
    factor = torch.where(factor.isfinite(), factor, 0)
    return (groups * factor[..., None]).round().to(torch.int8), most / 127


def pack_bytes(numbers: torch.Tensor) -> torch.Tensor:
    """int8 ``[N, K]``, N a multiple of 32 and K of 64, to ``[N / 32, K / 4, 32, 4]``."""
    return numbers.unflatten(1, (-1, 4)).unflatten(0, (-1, COLUMNS)).transpose(1, 2).contiguous()


def unpack_int8(packed: torch.Tensor, scales: torch.Tensor, features: int, depth: int) -> torch.Tensor:
    """The weight, float32 ``[features, depth]``."""
    return scaled(packed.transpose(1, 2).flatten(2).flatten(0, 1), scales)[:features, :depth]


def _packed(numbers: torch.Tensor, scales: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return pack_bytes(numbers.flatten(1)), pack_scales(scales)


class Int8(Form):
    """Weights as int8 with a scale for each group of 64 columns."""

    name = "int8"
    tensors = ("int8", "scales")
    linear, linears = ops.int8_linear.default, ops.int8_linears.default
    fused = ops.fused_int8_linears.default
    embedding = ops.int8_embedding.default
    expert_linear = ops.int8_expert_linear.default
    rounds = True
    # Half of the largest scale, and the last bits of the product with it.
    allowed = 0.51 / 127
    description = "rounded to int8 in groups of 64"

    def pack(self, weight: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return pack_by_rows(weight, lambda rows: _packed(*quantise(rows)))

    def unpack(self, packed: tuple[torch.Tensor, ...], features: int, depth: int) -> torch.Tensor:
        numbers, scales = packed
        return unpack_int8(numbers, scales, features, depth)

    def distance(self, weight: torch.Tensor, values: torch.Tensor) -> tuple[float, float]:
        return float((values - weight).abs().max()), float(weight.abs().max())

    def nbytes(self, features: int, depth: int, itemsize: int) -> int:
        return ceil_to(features, COLUMNS) * ceil_to(depth, GROUP) // GROUP * (GROUP + 4)

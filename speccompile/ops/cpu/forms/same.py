"""The model's own values, in blocks of 32 outputs."""

from __future__ import annotations

import torch

import speccompile.ops.native  # noqa: F401  defines the ops
from speccompile.ops.cpu.forms.base import COLUMNS, Form, ceil_to, whole_columns

ops = torch.ops.speccompile


def pack(weight: torch.Tensor) -> torch.Tensor:
    """``[N, K]`` to ``[ceil(N / 32), K, 32]``, a copy; columns after N are zeros."""
    blocks = whole_columns(weight).unflatten(0, (-1, COLUMNS))
    return blocks.transpose(1, 2).clone(memory_format=torch.contiguous_format)


def unpack(packed: torch.Tensor, features: int) -> torch.Tensor:
    """The weight ``[features, K]`` that :func:`pack` received."""
    return packed.transpose(1, 2).reshape(-1, packed.shape[1])[:features]


class Same(Form):
    """Weights in their own dtype, packed for the C++ ops."""

    name = "same"
    tensors = ("packed",)
    linear, linears = ops.packed_linear.default, ops.packed_linears.default
    fused = ops.fused_packed_linears.default
    embedding = ops.packed_embedding.default
    rounds = False
    allowed = 0.0
    description = "packed"

    def pack(self, weight: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (pack(weight),)

    def unpack(self, packed: tuple[torch.Tensor, ...], features: int, depth: int) -> torch.Tensor:
        return unpack(packed[0], features)

    def distance(self, weight: torch.Tensor, values: torch.Tensor) -> tuple[float, float]:
        return float(not torch.equal(values, weight)), 0.0

    def nbytes(self, features: int, depth: int, itemsize: int) -> int:
        return ceil_to(features, COLUMNS) * depth * itemsize

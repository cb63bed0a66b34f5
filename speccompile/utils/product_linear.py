"""A linear that a model computes as a product of two tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

_PRODUCTS = (torch.matmul, torch.Tensor.matmul, torch.Tensor.__matmul__)


@dataclass(frozen=True)
class ProductLinear:
    """A linear over ``x`` ``[..., I]``.

    ``weight`` begins where the model's ``[O, I]`` does. With ``columns`` the product is ``[B, O, T]``, for ``x``
    ``[B, T, I]``.
    """

    x: torch.Tensor
    weight: torch.Tensor
    columns: bool


def product_linear(func: Callable[..., Any], args: Sequence[Any]) -> ProductLinear | None:
    """Return the linear that a call may be, if the weight is one of a linear: ``weight [O, I] @ x [B, I, T]`` (Mamba's
    time steps) or ``x [..., I] @ weight.T`` (Falcon). :func:`speccompile.graph_capture.clean.clean_graph` rewrites
    both as linears."""
    if func not in _PRODUCTS or len(args) != 2:
        return None
    left, right = args
    if (left.dim(), right.dim()) == (2, 3):
        return ProductLinear(right.transpose(1, 2), left, columns=True)
    # The rows of a matrix that is not transposed follow one another in memory.
    if right.dim() == 2 and right.stride(0) <= right.stride(1):
        return ProductLinear(left, right, columns=False)
    return None

"""A linear that a model writes as a product with the weight on the left."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

_PRODUCTS = (torch.matmul, torch.Tensor.matmul, torch.Tensor.__matmul__)


def is_transposed_linear(func: Callable[..., Any], args: Sequence[Any]) -> bool:
    """Whether a call may be ``weight [O, I] @ x [B, I, T]``: Mamba's time steps. In a captured graph they are a linear
    over ``x.transpose(1, 2)``."""
    return func in _PRODUCTS and len(args) == 2 and (args[0].dim(), args[1].dim()) == (2, 3)

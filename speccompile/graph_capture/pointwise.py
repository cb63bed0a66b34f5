"""Elementwise functions whose bits do not depend on a value's position in its tensor.

On a CPU torch's own kernels compute the last values of a tensor, which do not fill a vector, with scalar code. Its
exponentials differ in the last bit. A token with few values (time steps of heads, scores of experts) would then depend
on the number of tokens in the tensor. ``exp`` and ``log1p`` do not have this problem.
"""

from __future__ import annotations

import torch

#: torch's threshold of ``softplus``.
LINEAR_FROM = 20.0


def softplus(x: torch.Tensor) -> torch.Tensor:
    """Compute ``F.softplus(x)``."""
    number = x.float()
    return torch.where(number > LINEAR_FROM, number, number.exp().log1p()).to(x.dtype)


def sigmoid(x: torch.Tensor) -> torch.Tensor:
    """Compute ``torch.sigmoid(x)``."""
    return (1 / (1 + (-x.float()).exp())).to(x.dtype)


def silu(x: torch.Tensor) -> torch.Tensor:
    """Compute ``F.silu(x)``."""
    number = x.float()
    return (number / (1 + (-number).exp())).to(x.dtype)

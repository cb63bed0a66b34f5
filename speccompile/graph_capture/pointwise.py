"""Functions of single numbers that have the same bits wherever in a tensor a number lies.

On a CPU torch's own kernels compute the last numbers of a tensor, as many as fill no vector, by scalar code, whose
exponentials differ in the last bit. A token with few numbers (time steps of heads, scores of experts) would then depend
on how many tokens are computed beside it. ``exp`` and ``log1p`` have no such remainder.
"""

from __future__ import annotations

import torch

#: torch's threshold of ``softplus``.
LINEAR_FROM = 20.0


def softplus(x: torch.Tensor) -> torch.Tensor:
    """``F.softplus(x)``."""
    number = x.float()
    return torch.where(number > LINEAR_FROM, number, number.exp().log1p()).to(x.dtype)


def sigmoid(x: torch.Tensor) -> torch.Tensor:
    """``torch.sigmoid(x)``."""
    return (1 / (1 + (-x.float()).exp())).to(x.dtype)


def silu(x: torch.Tensor) -> torch.Tensor:
    """``F.silu(x)``."""
    number = x.float()
    return (number / (1 + (-number).exp())).to(x.dtype)

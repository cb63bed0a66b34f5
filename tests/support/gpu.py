"""Tensors on a GPU, and how far a kernel's results may be from its reference."""

from __future__ import annotations

import torch

TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


def on_gpu(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Copies on the current GPU."""
    return tuple(tensor.cuda() for tensor in tensors)

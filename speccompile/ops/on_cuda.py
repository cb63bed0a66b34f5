"""What ops of ours are on CUDA."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from speccompile.utils.torch_private import OpOverload

_kernels: dict[str, Callable[..., Any]] = {}


def register_on_cuda(library: torch.library.Library, name: str, kernel: Callable[..., Any]) -> None:
    """``kernel`` runs ``speccompile::name`` on CUDA, by launches of Triton's alone."""
    library.impl(name, kernel, "CUDA")
    _kernels[f"speccompile::{name}"] = kernel


def cuda_kernel(op: OpOverload) -> Callable[..., Any] | None:
    """What was registered for an op, None if nothing was."""
    return _kernels.get(op._schema.name)

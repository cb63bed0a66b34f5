"""Registration of CUDA kernels for the package's ops."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from speccompile.utils.torch_private import OpOverload

_kernels: dict[str, Callable[..., Any]] = {}


def register_on_cuda(library: torch.library.Library, name: str, kernel: Callable[..., Any]) -> None:
    """Register ``kernel``, which only launches Triton kernels, for ``speccompile::name`` on CUDA."""
    library.impl(name, kernel, "CUDA")
    _kernels[f"speccompile::{name}"] = kernel


def cuda_kernel(op: OpOverload) -> Callable[..., Any] | None:
    """The kernel that was registered for an op; None without one."""
    return _kernels.get(op._schema.name)

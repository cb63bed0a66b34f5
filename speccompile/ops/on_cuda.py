"""Registration of CUDA kernels for the package's ops."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Any

import torch

from speccompile.utils.torch_private import OpOverload

_kernels: dict[str, Callable[..., Any]] = {}


def register_on_cuda(library: torch.library.Library, name: str, kernel: str | Callable[..., Any]) -> None:
    """Register ``kernel``, which only launches Triton kernels, for ``speccompile::name`` on CUDA.

    Args:
        kernel: accepts the arguments of the op; a string is one of :func:`in_triton`.
    """
    function = in_triton(kernel) if isinstance(kernel, str) else kernel
    library.impl(name, function, "CUDA")
    _kernels[f"speccompile::{name}"] = function


def in_triton(path: str, **options: Any) -> Callable[..., Any]:
    """The function ``path``, ``"file.function"`` in ``speccompile.ops.triton``, called with ``options`` in addition.

    A call imports the file, not the registration: triton is slow to import, and may be missing without CUDA.
    """
    return partial(_call, *path.split("."), **options)


def _call(file: str, name: str, /, *arguments: Any, **options: Any) -> Any:
    return getattr(import_module(f"speccompile.ops.triton.{file}"), name)(*arguments, **options)


def cuda_kernel(op: OpOverload) -> Callable[..., Any] | None:
    """The kernel that was registered for an op; None without one."""
    return _kernels.get(op._schema.name)

"""Definition of an op by one call: its schema, and its implementations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from speccompile.ops.in_cpp import IN_BODIES, RECORDED, in_cpp
from speccompile.ops.on_cuda import register_on_cuda

#: Dispatch key of a reference that runs on any device until a kernel is registered for the device.
ANY_DEVICE = "CompositeExplicitAutograd"

_library = torch.library.Library("speccompile", "FRAGMENT")


def define(
    schema: str,
    fake: Callable[..., Any] | None,
    reference: Callable[..., Any] | None = None,
    *,
    key: str = ANY_DEVICE,
    cpp: str | None = None,
    native: str | None = None,
    in_bodies: bool = False,
    recorded: bool = False,
    cuda: str | Callable[..., Any] | None = None,
) -> None:
    """Define ``speccompile::NAME`` of ``schema``, ``"NAME(Tensor x) -> Tensor"``.

    ``Library.impl`` registers, not ``torch.library.custom_op``, which adds tens of microseconds to every call.

    Args:
        fake: returns empty results; None for an op without results.
        reference: the definition of the op; None for one that only has kernels.
        key: the dispatch key of ``reference``.
        cpp: the library of the op's C++ kernel, which returns the values of the reference.
        native: the library of a C++ kernel that rounds in another way. It is the op ``native_NAME``.
        in_bodies: whether compiled bodies call the op of ``cpp`` or ``native``: the library also has its C function.
        recorded: whether the C++ kernel does all work of the op by ``run_kernel`` (``csrc/base/ops/kernel_calls.h``).
            A recorded step then repeats it without the op.
        cuda: the op's kernel, as :func:`~speccompile.ops.on_cuda.register_on_cuda` accepts it.
    """
    name = schema.partition("(")[0]
    _library.define(schema)
    torch.library.register_fake(f"speccompile::{name}", fake or _no_results, lib=_library)
    if reference is not None:
        _library.impl(name, reference, key)
    if recorded:
        RECORDED.add(name)
    if cpp is not None:
        in_cpp(name, cpp)
        IN_BODIES.extend([name] * in_bodies)
    if native is not None:
        define(f"native_{schema}", fake, cpp=native, in_bodies=in_bodies, recorded=recorded)
    if cuda is not None:
        register_on_cuda(_library, name, cuda)


def _no_results(*_: Any, **__: Any) -> None:
    pass

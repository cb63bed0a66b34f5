"""Definition of an op by one call: its schema, and its implementations."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from speccompile.ops.cpu.library import LIBRARIES
from speccompile.ops.cpu.shims import C_RESULTS, C_TYPES
from speccompile.ops.in_cpp import IN_BODIES, RECORDED, in_cpp
from speccompile.ops.on_cuda import register_on_cuda
from speccompile.utils.torch_private import OpOverload, parse_schema

#: Dispatch key of a reference that runs on any device until a kernel is registered for the device.
ANY_DEVICE = "CompositeExplicitAutograd"

_TRITON = Path(__file__).with_name("triton")
_library = torch.library.Library("speccompile", "FRAGMENT")
_references: dict[str, Callable[..., Any]] = {}


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

    A library is loaded when a step that calls the op is lowered, not here.

    Raises:
        ValueError: an argument is not valid. Nothing was registered.
    """
    name = schema.partition("(")[0] if isinstance(schema, str) else repr(schema)
    for problem in _problems(schema, fake, reference, cpp, native, in_bodies, cuda):
        raise ValueError(f"op {name} cannot be defined: {problem}")
    _library.define(schema)
    torch.library.register_fake(f"speccompile::{name}", fake or _no_results, lib=_library)
    if reference is not None:
        _library.impl(name, reference, key)
        _references[name] = reference
    if recorded:
        RECORDED.add(name)
    if cpp is not None:
        in_cpp(name, cpp)
        IN_BODIES.extend([name] * in_bodies)
    if native is not None:
        define(f"native_{schema}", fake, cpp=native, in_bodies=in_bodies, recorded=recorded)
    if cuda is not None:
        register_on_cuda(_library, name, cuda)


def reference_of(op: OpOverload) -> Callable[..., Any] | None:
    """The definition of an op of the package; None if it only has kernels."""
    return _references.get(op._opname) if op.namespace == "speccompile" else None


def _problems(
    schema: str,
    fake: Callable[..., Any] | None,
    reference: Callable[..., Any] | None,
    cpp: str | None,
    native: str | None,
    in_bodies: bool,
    cuda: str | Callable[..., Any] | None,
) -> Iterator[str]:
    """Each argument of :func:`define` that is not valid, and what to do."""
    if not isinstance(schema, str):
        yield 'schema must be a str such as "NAME(Tensor x) -> Tensor"'
    try:
        parsed = parse_schema(schema)
    except RuntimeError as error:
        yield f"torch cannot read the schema {schema!r}. {error}"
    if fake is None and parsed.returns:
        yield "it returns a result, but fake=None; give a function that returns empty results"
    for option, function in {"fake": fake, "reference": reference}.items():
        if function is not None and not callable(function):
            yield f"{option} must be a function, got {function!r}"
    if reference is None and cpp is None and native is None and cuda is None:
        yield "it has no implementation; give reference, cpp, native or cuda"
    for option, library in (("cpp", cpp), ("native", native)):
        if library is not None and library not in LIBRARIES:
            yield (
                f"{option}={library!r} is not a library; add the folder ops/cpu/csrc/{library}, or give one of "
                f"{', '.join(LIBRARIES)}"
            )
    if in_bodies and cpp is None and native is None:
        yield "in_bodies=True needs a C++ kernel; give its library as cpp or native"
    if in_bodies:
        for kind, known in ((parsed.arguments, C_TYPES), (parsed.returns, C_RESULTS)):
            for value in kind:
                if str(value.type) not in known:
                    yield (
                        f"in_bodies=True and its schema has a value of type {value.type}, which has no form in C; use "
                        f"one of {', '.join(known)}, or add the type to ops/cpu/shims.py"
                    )
    if cuda is not None and not callable(cuda):
        file, _, name = cuda.partition(".") if isinstance(cuda, str) else ("", "", "")
        if not name or not (_TRITON / f"{file}.py").exists():
            yield f'cuda must be a function, or "FILE.FUNCTION" of a file in ops/triton, got {cuda!r}'


def _no_results(*_: Any, **__: Any) -> None:
    pass

"""Kernels that a function launches on CUDA, recorded by torch's dispatcher over fakes. No GPU is needed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, TypeGuard

from speccompile.graph.fakes import faking
from speccompile.ops.define import reference_of
from speccompile.ops.on_cuda import cuda_kernel
from speccompile.utils.torch_private import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    OpOverload,
    TorchDispatchMode,
)

#: Kinds of the package's kernels: ``triton``, ``c++``, and ``plain`` (an op of the package that consists of torch's
#: ops). Other kinds: ``inductor`` (generated code), ``stock`` (torch's own), and ``body`` (a function of the step,
#: whose calls are listed separately).
KernelKind = Literal["triton", "c++", "plain", "inductor", "stock", "body"]
Kernels = Counter[tuple[str, KernelKind]]

NAMESPACE = "speccompile"
_ALLOCATIONS = ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "_unsafe_view")


@dataclass
class Dispatched:
    """The kernels of torch's own ops, and those of each op of the package by its name."""

    torch: Kernels = field(default_factory=Counter)
    ours: dict[str, Kernels] = field(default_factory=dict)

    @property
    def all(self) -> Kernels:
        """All kernels, those of torch and of the package."""
        found = Counter(self.torch)
        for kernels in self.ours.values():
            found += kernels
        return found


def op_name(op: OpOverload) -> str:
    """Return the op's name in a list of kernels, ``aten.mm`` or ``aten.add.Tensor``."""
    return str(op).removesuffix(".default")


def starts_kernels(target: object) -> TypeGuard[OpOverload]:
    """Whether a call of ``target`` starts kernels. Views, allocations and arithmetic on sizes do not."""
    if not isinstance(target, OpOverload) or target.is_view or target._opname in _ALLOCATIONS:
        return False
    schema = target._schema
    return schema.is_mutable or any("Tensor" in str(result.type) for result in schema.returns)


def dispatched(work: Callable[[], object]) -> Dispatched:
    """Return the kernels that ``work`` would start on CUDA. It runs on fakes, which may be of another device.

    Kernels that depend on values are not seen: an op that reads a value on the host is only listed up to there.
    """
    found = Dispatched()
    with faking(), _Noting(found):
        work()
    return found


class _Noting(TorchDispatchMode):
    """Records every op that it receives. ``inside`` is the op of the package whose kernels are being recorded."""

    def __init__(self, found: Dispatched, inside: str | None = None) -> None:
        super().__init__()
        self._found = found
        self._kernels = found.torch if inside is None else found.ours.setdefault(inside, Counter())
        self._inside = inside

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if starts_kernels(func):
            if func.namespace == NAMESPACE:
                _Noting(self._found, self._inside or op_name(func)).note_ours(func, args, kwargs)
            else:
                self._kernels[op_name(func), "stock"] += 1
        return func(*args, **kwargs)

    def note_ours(self, op: OpOverload, args: Any, kwargs: Any) -> None:
        """Record the Triton kernels that ``op`` launches and the torch ops that it calls around them. For an op without
        Triton kernels, record the torch ops that it consists of."""
        from speccompile.ops.triton.launch import launches_of

        kernel = cuda_kernel(op)
        with self:
            if kernel is not None:
                for launch in launches_of(lambda: kernel(*args, **kwargs)):
                    self._kernels[f"{op_name(op)}: {launch.kernel.__name__}", "triton"] += 1
                return
            self._kernels[op_name(op), "plain"] += 1
            reference = reference_of(op)
            if reference is None:
                return
            try:
                # Not by torch's dispatcher: where the op's library is loaded, it would call C++ with fakes.
                reference(*args, **kwargs)
            except (DataDependentOutputException, DynamicOutputShapeException):
                return

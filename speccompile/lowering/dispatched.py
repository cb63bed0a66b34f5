"""The kernels that a piece of work starts on CUDA: seen by torch's dispatcher, over fakes, so that no GPU is needed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, TypeGuard

from speccompile.graph.fakes import faking
from speccompile.ops.on_cuda import cuda_kernel
from speccompile.utils.torch_private import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    OpOverload,
    TorchDispatchMode,
    run_kernel,
)

#: Ours: ``triton``, ``c++``, and ``plain``, an op of ours that is made of torch's. Not ours: what ``inductor`` wrote,
#: and torch's own, ``stock``. ``body``: a function of the step, whose calls are listed beside.
KernelKind = Literal["triton", "c++", "plain", "inductor", "stock", "body"]
Kernels = Counter[tuple[str, KernelKind]]

NAMESPACE = "speccompile"
_ALLOCATIONS = ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "_unsafe_view")


@dataclass
class Dispatched:
    """The kernels of torch's own ops, and by its name those of each op of the package."""

    torch: Kernels = field(default_factory=Counter)
    ours: dict[str, Kernels] = field(default_factory=dict)

    @property
    def all(self) -> Kernels:
        """All of them."""
        found = Counter(self.torch)
        for kernels in self.ours.values():
            found += kernels
        return found


def op_name(op: OpOverload) -> str:
    """The op's name in a list of kernels, ``aten.mm`` or ``aten.add.Tensor``."""
    return str(op).removesuffix(".default")


def starts_kernels(target: object) -> TypeGuard[OpOverload]:
    """Whether a call of ``target`` starts kernels: views, allocations and arithmetic on sizes do not."""
    if not isinstance(target, OpOverload) or target.is_view or target._opname in _ALLOCATIONS:
        return False
    schema = target._schema
    return schema.is_mutable or any("Tensor" in str(result.type) for result in schema.returns)


def dispatched(work: Callable[[], object]) -> Dispatched:
    """The kernels that ``work`` would start on CUDA. It is run on fakes, which may be of another device.

    Kernels that follow from values are not seen: an op that reads one on the host is listed up to there.
    """
    found = Dispatched()
    with faking(), _Noting(found):
        work()
    return found


class _Noting(TorchDispatchMode):
    """Notes every op that it receives. ``inside`` is the op of the package whose kernels are being noted."""

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
        """Its launches of Triton kernels, and the ops of torch that it calls around them, or consists of."""
        from speccompile.ops.triton.launch import launches_of

        kernel = cuda_kernel(op)
        with self:
            if kernel is not None:
                for launch in launches_of(lambda: kernel(*args, **kwargs)):
                    self._kernels[f"{op_name(op)}: {launch.kernel.__name__}", "triton"] += 1
                return
            self._kernels[op_name(op), "plain"] += 1
            try:
                run_kernel(op, args, kwargs)
            except (DataDependentOutputException, DynamicOutputShapeException):
                return

"""The kernels that a step runs on."""

from __future__ import annotations

from dataclasses import dataclass

from speccompile.errors import Degraded
from speccompile.graph_capture.model_info import ModelInfo
from speccompile.ops.cpu.library import cpu_ops, forget_failures, load_cpu_ops, missing_tools, vector_name
from speccompile.utils.devices import traits_of
from speccompile.utils.progress import task
from speccompile.utils.warn import warn_caller


@dataclass(frozen=True)
class Kernels:
    """The kernels of a step, and how passes use them.

    Args:
        native: linears and attention are the package's C++ ops, over packed weights; else torch's own.
        reason: the reason for this choice, for ``explain()``.
        rounded: linears over rounded weights have a kernel of the package, also if others are torch's own.
        few_launches: a launch is so expensive that the ops around the layers are joined.
        joins_weights: torch's linears that read one input are one product
            (:mod:`speccompile.passes.target.join_weights`).
        skinny_linears: linears in half precision are one op, which has a kernel for few rows.
        filters: temperature, top-k, top-p and min-p are one op. Requests that use only these have their own kind of
            steps.
    """

    native: bool
    reason: str
    rounded: bool = False
    few_launches: bool = False
    joins_weights: bool = False
    skinny_linears: bool = False
    filters: bool = False

    def prepare(self, *libraries: str) -> None:
        """Begin to build C++ libraries that some steps call beside the basic ops, if steps call C++ ops at all."""

    def settled(self, *libraries: str) -> Kernels:
        """Wait for the C++ ops, and return the kernels that are available. The ops can be called afterwards.

        Args:
            libraries: libraries that some steps call beside ``base``. If one is missing, steps run on torch's own ops.
        """
        return self


@dataclass(frozen=True)
class _PendingKernels(Kernels):
    """The C++ ops while they are being built: the kernels that will most likely be available."""

    def prepare(self, *libraries: str) -> None:
        for library in libraries:
            cpu_ops(library)

    def settled(self, *libraries: str) -> Kernels:
        with task("compile the CPU ops"):
            missing = load_cpu_ops(*libraries)
        if missing:
            warn_caller(
                f"the C++ ops cannot be used ({missing}), so steps run on torch's own linears and attention: slower, "
                "and their results may depend on the tier. Correct the cause and wrap again",
                Degraded,
            )
        return _stock(missing) if missing else Kernels(True, f"ours, in {vector_name()}")


STOCK = Kernels(False, "torch's own")
#: Kernels on CUDA. Attention has a Triton kernel with every backend, since that is the op's implementation on CUDA.
ON_CUDA = Kernels(
    False,
    "Triton's for attention, linears of up to 16 rows in half precision, choice of tokens, commit and n-gram match; "
    "torch's own for other linears that are not rounded",
    rounded=True,
    few_launches=True,
    joins_weights=True,
    skinny_linears=True,
    filters=True,
)


def choose_kernels(info: ModelInfo) -> Kernels:
    """Return the package's kernels if available: they read each weight once, and keep a row's order of sums."""
    traits = traits_of(info.device)
    if traits.triton_ops:
        return ON_CUDA
    if not traits.cpp_ops:
        return STOCK
    missing = missing_tools()
    if missing:
        return _stock(missing)
    # An earlier wrap may have failed, and reported the cause.
    forget_failures()
    cpu_ops()
    return _PendingKernels(True, "ours")


def _stock(missing: str) -> Kernels:
    return Kernels(False, f"torch's own: {missing}")

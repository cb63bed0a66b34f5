"""Which kernels a step runs on."""

from __future__ import annotations

from dataclasses import dataclass

from speccompile.graph_capture.support import ModelInfo
from speccompile.lowering.cpu.library import load_cpu_ops, vector_name


@dataclass(frozen=True)
class Kernels:
    """``native``: linears and attention are the C++ ops, over packed weights; else torch's own. ``step_ops``: commit
    and n-gram match are single ops (:mod:`speccompile.passes.step_ops`). ``reason`` says why, for
    ``explain()``."""

    native: bool
    reason: str
    step_ops: bool = False


STOCK = Kernels(False, "torch's own")
#: Attention has a Triton kernel there whichever backend runs it: that is what the op is on CUDA.
ON_CUDA = Kernels(
    False, "Triton's for attention, choice of tokens, commit and n-gram match; torch's own for linears", True
)


def choose_kernels(info: ModelInfo) -> Kernels:
    """Ours where they can be had: they read each weight once, and keep a row's order of sums."""
    if info.device.type == "cuda":
        return ON_CUDA
    if info.device.type != "cpu":
        return STOCK
    missing = load_cpu_ops()
    if missing:
        return Kernels(False, f"torch's own: {missing}")
    return Kernels(True, f"ours, in {vector_name()}")

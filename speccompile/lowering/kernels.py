"""Which kernels linears and attention run on."""

from __future__ import annotations

from dataclasses import dataclass

from speccompile.graph_capture.support import ModelInfo
from speccompile.lowering.cpu.library import load_cpu_ops, vector_name


@dataclass(frozen=True)
class Kernels:
    """``native``: the C++ ops, over packed weights; else torch's own. ``reason`` says why, for ``explain()``."""

    native: bool
    reason: str


STOCK = Kernels(False, "torch's own")


def choose_kernels(info: ModelInfo) -> Kernels:
    """Ours where they can be had: they read each weight once, and keep a row's order of sums."""
    if info.device.type != "cpu":
        return STOCK
    missing = load_cpu_ops()
    if missing:
        return Kernels(False, f"torch's own: {missing}")
    return Kernels(True, f"ours, in {vector_name()}")

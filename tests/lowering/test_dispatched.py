"""Kernels that torch's dispatcher records over fakes."""

from __future__ import annotations

import torch

import speccompile.ops.draft_rows  # noqa: F401  defines the op
from speccompile.graph.fakes import faking
from speccompile.lowering.dispatched import dispatched
from speccompile.ops.cpu.library import load_cpu_ops


def test_an_op_without_triton_kernels_is_listed_by_its_definition() -> None:
    """Its C++ kernel would read the memory of the fakes."""
    assert load_cpu_ops("base") is None
    with faking():
        one, other = torch.zeros(3, 4, dtype=torch.int64), torch.ones(3, 2, dtype=torch.int64)
    found = dispatched(lambda: torch.ops.speccompile.side_by_side([one, other]))
    (kernels,) = found.ours.values()
    assert kernels["speccompile.side_by_side", "plain"] == 1
    assert [name for name, kind in kernels if kind == "stock"] == ["aten.cat"]

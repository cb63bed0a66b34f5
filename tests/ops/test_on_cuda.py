"""Kernels on CUDA are registered by the names of their functions, which are imported when a kernel runs."""

from __future__ import annotations

import ast
from functools import partial
from pathlib import Path

import speccompile.ops
import speccompile.sampling  # registers the kernels of processors
from speccompile.ops.on_cuda import _kernels

TRITON = Path(speccompile.ops.__file__).parent / "triton"


def test_every_kernel_that_is_registered_by_its_name_exists() -> None:
    named = [kernel.args for kernel in _kernels.values() if isinstance(kernel, partial)]
    assert ("tree", "fit_tree") in named and ("ngram", "match") in named
    for file, name in named:
        functions = [
            item for item in ast.parse((TRITON / f"{file}.py").read_text()).body if isinstance(item, ast.FunctionDef)
        ]
        assert name in [item.name for item in functions]

"""The code that Inductor generates for bodies of a step on CUDA."""

from __future__ import annotations

from collections.abc import Mapping
from unittest.mock import patch

import torch
from torch._inductor import config
from torch._inductor.codegen.wrapper import PythonWrapperCodegen
from torch._inductor.graph import GraphLowering

from benchmarks.without_gpu.hopper import hopper
from speccompile.errors import LoweringError
from speccompile.graph.body import Body
from speccompile.graph.step_graph import StepGraph
from speccompile.lowering.artifacts import artifact_name
from speccompile.lowering.inductor import compile_body

DEVICE = torch.device("cuda", 0)

_known: dict[str, str] = {}


class _Written(Exception):
    """The module is written. It cannot be loaded without a GPU."""


def cuda_code(graph: StepGraph) -> Mapping[str, str]:
    """The module that would call the kernels of each body of ``graph``, by the body's name, as
    ``Backend.compiled_code`` returns it on an H100.

    Raises:
        LoweringError: Inductor cannot compile a body for CUDA.
    """
    return {name: _code(body) for name, body in graph.bodies.items()}


def _code(body: Body) -> str:
    key = artifact_name(body, torch.device("cpu"))
    if key not in _known:
        _known[key] = _written(body)
    return _known[key]


def _written(body: Body) -> str:
    found: list[str] = []

    def keep(code: str) -> None:
        found.append(code)
        raise _Written

    keeping = patch.object(GraphLowering, "save_output_code", keep)
    untuned = patch.object(PythonWrapperCodegen, "generate_and_run_autotune_block", lambda _: None)
    # Cached code would not be written again.
    fresh = config.patch({"fx_graph_cache": False, "fx_graph_remote_cache": False})
    with hopper(), keeping, untuned, fresh:
        try:
            compile_body(body, DEVICE)
        except LoweringError:
            if not found:
                raise
    return found[0]

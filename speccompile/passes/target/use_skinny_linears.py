"""Linears in half precision become one op, which on CUDA has a kernel for the few rows of a decode step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import fx

from speccompile.graph.step_graph import StepGraph
from speccompile.ops.skinny_linear import SKINNY_DTYPES
from speccompile.passes.base import Changes, Facts, Pass, PassRegion, facts

aten = torch.ops.aten


@dataclass(frozen=True)
class UseSkinnyLinears(Pass):
    """Every linear over a weight in half precision becomes ``speccompile::skinny_linear``."""

    name: ClassVar[str] = "use_skinny_linears"
    looks_for: ClassVar[str] = "linears in half precision"
    region: ClassVar[PassRegion] = "model"
    requires: ClassVar[Facts] = facts("linears_chosen")
    provides: ClassVar[Facts] = facts("skinny_linears")
    # The weights of a model may be in float32, or rounded.
    optional: ClassVar[bool] = True

    def run(self, graph: StepGraph) -> Changes:
        done = 0
        for node in graph.graph.find_nodes(op="call_function", target=aten.linear.default):
            if not _is_over_half_precision(graph, node):
                continue
            with graph.graph.inserting_before(node):
                new = graph.graph.call_function(torch.ops.speccompile.skinny_linear.default, node.args)
            new.meta = {key: value for key, value in node.meta.items() if key in ("layer", "pass")}
            graph.replace(node, new)
            done += 1
        return Changes(done, f"{done} linears")


def _is_over_half_precision(graph: StepGraph, linear: fx.Node) -> bool:
    weight = linear.args[1]
    if not isinstance(weight, fx.Node) or weight.op != "placeholder" or linear.kwargs:
        return False
    port = graph.ports[weight.name]
    return port.dtype in SKINNY_DTYPES and len(port.shape) == 2

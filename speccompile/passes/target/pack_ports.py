"""Placeholders of packed weights in a step graph."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import fx

from speccompile.graph.port import Port
from speccompile.graph.step_graph import StepGraph
from speccompile.ops.cpu.packing import PACKED_DTYPES, Pack


def pack_ports(graph: StepGraph, port: Port, pack: Pack) -> list[fx.Node]:
    """Add the placeholders of the tensors of ``pack``, which stands for the weight of ``port``."""
    return [
        graph.weight(
            replace(
                port, name=f"{port.name}_{name}", shape=tuple(value.shape), dtype=value.dtype, value=value, own=True
            )
        )
        for name, value in zip(pack.form.tensors, pack.tensors, strict=True)
    ]


def is_dense(port: Port) -> bool:
    """Whether it is the model's own tensor. A subclass (quantised weights) computes in its own way."""
    of_torch = type(port.value) in (torch.Tensor, torch.nn.Parameter)
    return of_torch and port.path is not None and not port.own and port.dtype in PACKED_DTYPES

"""What a captured graph computes, run as it is."""

from __future__ import annotations

import torch
from torch import fx, nn

from speccompile.graph.step_graph import StepGraph


def outcome(graph: StepGraph, rows: int, width: int) -> dict[str, torch.Tensor]:
    """Logits of random tokens at ragged positions, and all keys and values afterwards."""
    generator = torch.Generator().manual_seed(rows * 100 + width)
    first = torch.randint(8, (rows, 1), generator=generator)
    inputs = {
        "input_ids": torch.randint(128, (rows, width), generator=generator),
        "position_ids": first + torch.arange(width),
        "row_slots": torch.randperm(3, generator=generator)[:rows],
    }
    values: dict[str, torch.Tensor] = {}
    for node in graph.placeholders:
        port = graph.ports[node.name]
        if port.role == "weight":
            assert port.value is not None
            values[node.name] = port.value
        elif port.role == "state":
            noise = torch.randn(port.shape, generator=torch.Generator().manual_seed(len(node.name)))
            values[node.name] = noise.to(port.dtype)
        else:
            values[node.name] = inputs[node.name]
    root = nn.Module()
    for name, body in graph.bodies.items():
        root.add_module(name, body.module)
    with torch.no_grad():
        (logits,) = fx.Interpreter(fx.GraphModule(root, graph.graph)).run(*values.values())
    return {"logits": logits} | {name: values[name] for name, port in graph.ports.items() if port.role == "state"}

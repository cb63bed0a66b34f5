"""Rotary positions of several parts (time, height and width), as Qwen2.5-VL's."""

from __future__ import annotations

import torch
from torch import nn

from speccompile.graph.step_graph import StepGraph

#: The parts of a position: time, height and width.
PARTS = 3
#: The captured graph's input ``[PARTS, B, T]``.
ROPE_POSITIONS = "rope_positions"


def has_parts(model: nn.Module) -> bool:
    """Whether the model's rotary positions have parts: transformers computes them by ``get_rope_index``."""
    return any(callable(getattr(module, "get_rope_index", None)) for module in model.modules())


def of_text(positions: torch.Tensor) -> torch.Tensor:
    """Rotary positions ``[PARTS, B, T]`` of text at ``positions`` ``[B, T]``: all parts are equal."""
    return positions[None].expand(PARTS, -1, -1)


def reads_parts(graph: StepGraph) -> bool:
    """Whether the captured graph reads rotary positions of several parts."""
    return ROPE_POSITIONS in graph.ports

"""Ports: the named placeholders of a step graph. All tensors enter the graph through ports."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import torch

from speccompile.graph.state import StateTensor

Role = Literal["weight", "state", "input"]


@dataclass(frozen=True)
class Port:
    """One placeholder of a step graph.

    Args:
        low, high: bounds of an integer tensor, ``low <= value < high``.
        distinct: no value occurs twice.
        path: a weight's name in the model. None for a constant in the code of the model or of a logits processor.
        own: the value is a copy of the model's tensor.
        parts: for a joined weight, which has no path: the paths of the weights that are views of the value, one after
            the other along its first dimension.
        held: the attribute of a module that holds a constant.
        value: the weight itself, or the arena's tensor after a tier is bound. None after a pass has freed the weight
            (:meth:`release`).
    """

    name: str
    role: Role
    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    low: int = 0
    high: int | None = None
    distinct: bool = False
    path: str | None = None
    own: bool = False
    parts: tuple[str, ...] = ()
    held: str | None = None
    value: torch.Tensor | None = field(default=None, repr=False, compare=False)

    @staticmethod
    def of_state(tensor: StateTensor, device: torch.device) -> Port:
        """The port of a state tensor."""
        return Port(tensor.name, "state", tensor.shape, tensor.dtype, device, tensor.low, tensor.high, tensor.distinct)

    def release(self) -> None:
        """Drop the value. This holds for all copies of the graph, which share their ports."""
        object.__setattr__(self, "value", None)

    @staticmethod
    def of_constant(name: str, value: torch.Tensor) -> Port:
        """The port of a tensor that is neither state nor a weight of the model. The bounds of an integer tensor are
        those of ``value``."""
        low, high = 0, None
        if not (value.is_floating_point() or value.is_complex() or value.dtype is torch.bool) and value.numel():
            low, high = int(value.min()), int(value.max()) + 1
        return Port(name, "weight", tuple(value.shape), value.dtype, value.device, low, high, value=value)

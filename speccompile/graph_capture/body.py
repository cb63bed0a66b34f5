"""An outlined piece of a step graph: one function for all equal decoder layers."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode


def size_of(dim: int | str, sizes: Mapping[str, int]) -> int:
    """A dimension of a body, where the named sizes are ``sizes``: ``size_of("4*B", {"B": 3})`` is 12."""
    if isinstance(dim, int):
        return dim
    return math.prod(sizes[factor] if factor in sizes else int(factor) for factor in dim.split("*"))


@dataclass(frozen=True)
class Body:
    """One group of equal decoder layers: a function of (hidden, weights, KV, ...) that all of them call.

    ``dims[i]`` are the sizes of input i; those that vary are named, ``"B"``, ``"T"``, ``"N"``, ``"S"``, or are
    products with a name, such as ``"4*B"`` (see :func:`size_of`);
    ``mutates`` are the inputs written in place; ``layers`` the decoder layers that call it.
    """

    name: str
    module: fx.GraphModule
    dims: tuple[tuple[int | str, ...], ...]
    dtypes: tuple[torch.dtype, ...]
    mutates: frozenset[int]
    layers: tuple[int, ...]
    key: str
    _fakes: dict[tuple[Any, ...], torch.Tensor] = field(default_factory=dict, repr=False, compare=False)

    def fake(self, inputs: Sequence[torch.Tensor], mode: FakeTensorMode) -> torch.Tensor:
        """The fake result for fake ``inputs``; runs the body once per combination of shapes."""
        shapes = tuple((tuple(x.shape), x.dtype, x.device) for x in inputs)
        if shapes not in self._fakes:
            with mode:
                self._fakes[shapes] = self.module(*inputs)
        # A tensor of its own for every call: tracing tells its inputs apart by identity.
        with mode:
            return torch.empty_like(self._fakes[shapes])

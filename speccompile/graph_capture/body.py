"""An outlined piece of a step graph: one function for all equal decoder layers."""

from __future__ import annotations

import functools
import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import cast

import torch
from torch import fx

from speccompile.graph_capture.fakes import faking, kind, of_kind


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

    def fake(self, inputs: Sequence[torch.Tensor]) -> torch.Tensor:
        """The fake result for fake ``inputs``."""
        with faking():
            return _result(_Call(self.key, tuple(map(kind, inputs)), self.module))


@dataclass(frozen=True)
class _Call:
    """A body is all that its key says."""

    key: str
    kinds: tuple[Hashable, ...]
    module: fx.GraphModule = field(compare=False)


@functools.lru_cache(maxsize=1024)
def _result(call: _Call) -> torch.Tensor:
    """What the body returns, which is run once per combination of shapes in a process."""
    with faking():
        return cast(torch.Tensor, call.module(*map(of_kind, call.kinds)))

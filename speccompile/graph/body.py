"""An outlined piece of a step graph: one function for all equal decoder layers."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from weakref import WeakValueDictionary

import torch
from torch import fx

from speccompile.graph.fakes import fake, faking, kind, settings


def size_of(dim: int | str, sizes: Mapping[str, int]) -> int:
    """The value of a dimension, given the named ``sizes``: ``size_of("4*B", {"B": 3})`` is 12."""
    if isinstance(dim, int):
        return dim
    return math.prod(sizes[factor] if factor in sizes else int(factor) for factor in dim.split("*"))


@dataclass(frozen=True)
class Body:
    """A group of equal decoder layers: a function of (hidden, weights, KV, ...) that all of them call.

    Args:
        dims: the sizes of each input. Sizes that vary are named, ``"B"``, ``"T"``, ``"N"``, ``"S"``, or are products
            with a name, such as ``"4*B"`` (see :func:`size_of`).
        result: the sizes of the result; None if it is not contiguous.
        captured: the B and T that it was captured with.
        mutates: the inputs that are written in place.
        layers: the decoder layers that call it.
        key: a digest, equal for equal functions.
    """

    name: str
    module: fx.GraphModule
    dims: tuple[tuple[int | str, ...], ...]
    dtypes: tuple[torch.dtype, ...]
    result: tuple[int | str, ...] | None
    result_dtype: torch.dtype
    captured: Mapping[str, int]
    mutates: frozenset[int]
    layers: tuple[int, ...]
    key: str

    def fake(self, inputs: Sequence[torch.Tensor]) -> torch.Tensor:
        """The fake result for fake ``inputs``.

        Raises:
            RuntimeError: the body does not accept them.
        """
        sizes = self._sizes(inputs)
        shape = None if self.result is None else tuple(size_of(dim, sizes) for dim in self.result)
        if shape is not None and self.key in _RUN:
            return fake(shape, self.result_dtype, inputs[0].device)
        call = self.key, settings(), *map(kind, inputs)
        if (known := _RESULTS.get(call)) is not None:
            return known
        with faking():
            found: torch.Tensor = self.module(*inputs)
        if shape is not None and (tuple(found.shape), found.dtype) != (shape, self.result_dtype):
            raise RuntimeError(
                f"{self.name} returns {found.dtype}{list(found.shape)}, and was to return "
                f"{self.result_dtype}{list(shape)}"
            )
        # Checked once at other sizes than those of the capture: one of these might be a constant in the body.
        if any(sizes.get(name) != size for name, size in self.captured.items()):
            _RUN.add(self.key)
        _RESULTS[call] = found
        return found

    def _sizes(self, inputs: Sequence[torch.Tensor]) -> dict[str, int]:
        """The named sizes of ``inputs``."""
        shapes = [tuple(item.shape) for item in inputs]
        pairs = [pair for dims, shape in zip(self.dims, shapes, strict=True) for pair in zip(dims, shape, strict=False)]
        sizes = {dim: size for dim, size in pairs if isinstance(dim, str) and "*" not in dim}
        expected = [tuple(size_of(dim, sizes) for dim in dims) for dims in self.dims]
        for index, (shape, fits) in enumerate(zip(shapes, expected, strict=True)):
            if shape != fits or inputs[index].dtype != self.dtypes[index]:
                raise RuntimeError(
                    f"input {index} of {self.name} is {inputs[index].dtype}{list(shape)}, and it takes "
                    f"{self.dtypes[index]}{list(fits)}"
                )
        return sizes


# Keys (digests) of the bodies that were run on fakes of other sizes in this process. Equal keys mean equal bodies.
_RUN: set[str] = set()
# Fake results by key, settings and the kinds of the inputs: 30 layers make one call. A result lives as long as the
# nodes of some graph that have it.
_RESULTS: WeakValueDictionary[tuple[Hashable, ...], torch.Tensor] = WeakValueDictionary()

"""An outlined part of a step graph: one function for all equal decoder layers, or for the ops before or after them."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal
from weakref import WeakValueDictionary

import torch
from torch import fx

from speccompile.graph.fakes import fake, faking, kind, settings


def size_of(dim: int | str, sizes: Mapping[str, int]) -> int:
    """The value of a dimension, given the named ``sizes``: ``size_of("4*B", {"B": 3})`` is 12."""
    if isinstance(dim, int):
        return dim
    return math.prod(sizes[factor] if factor in sizes else int(factor) for factor in dim.split("*"))


#: The part of a model that a body computes: equal decoder layers, what comes before the first layer, or what follows
#: the last one.
Part = Literal["layers", "prologue", "epilogue"]


@dataclass(frozen=True)
class BodyResult:
    """One result of a body. ``dims`` are its sizes, as in :attr:`Body.dims`, or None if it is not contiguous."""

    dims: tuple[int | str, ...] | None
    dtype: torch.dtype

    def shape(self, sizes: Mapping[str, int]) -> tuple[int, ...] | None:
        """Its shape for the named ``sizes``; None if it is not contiguous."""
        return None if self.dims is None else tuple(size_of(dim, sizes) for dim in self.dims)


@dataclass(frozen=True)
class Body:
    """A part of a step as a function of tensors: one function of (hidden, weights, KV, ...) that a group of equal
    decoder layers calls, or the ops before or after the layers.

    Args:
        dims: the sizes of each input. A size that varies is a name (``"B"``, ``"T"``, ``"N"``, ``"S"``, ``"P"`` or
            ``"M"``) or a product with a name, such as ``"4*B"`` (see :func:`size_of`).
        dtypes: the dtype of each input.
        results: its results: one tensor, or a tuple of several.
        captured: the sizes B and T at the capture.
        mutates: indices of the inputs that are written in place.
        layers: the decoder layers that call it; empty for a part other than ``layers``.
        key: a digest, equal for equal functions.
    """

    name: str
    module: fx.GraphModule
    dims: tuple[tuple[int | str, ...], ...]
    dtypes: tuple[torch.dtype, ...]
    results: tuple[BodyResult, ...]
    captured: Mapping[str, int]
    mutates: frozenset[int]
    layers: tuple[int, ...]
    key: str
    part: Part = "layers"

    def fake(self, inputs: Sequence[torch.Tensor]) -> torch.Tensor | tuple[torch.Tensor, ...]:
        """The fake result, or results, for fake ``inputs``.

        Raises:
            RuntimeError: shapes or dtypes of ``inputs`` do not fit :attr:`dims` and :attr:`dtypes`, or those of the
                results do not fit :attr:`results`.
        """
        sizes = self._sizes(inputs)
        shapes = [result.shape(sizes) for result in self.results]
        if self.key in _RUN:
            results, device = zip(shapes, self.results, strict=True), inputs[0].device
            made = [fake(shape, item.dtype, device) for shape, item in results if shape is not None]
            if len(made) == len(shapes):
                return _returned(made)
        call = self.key, settings(), *map(kind, inputs)
        known = [value for index in range(len(shapes)) if (value := _RESULTS.get((call, index))) is not None]
        if len(known) == len(shapes):
            return _returned(known)
        with faking():
            returned = self.module(*inputs)
        found = list(returned) if isinstance(returned, tuple) else [returned]
        for value, shape, item in zip(found, shapes, self.results, strict=True):
            if shape is not None and (tuple(value.shape), value.dtype) != (shape, item.dtype):
                raise RuntimeError(
                    f"{self.name} must return {item.dtype}{list(shape)}, got {value.dtype}{list(value.shape)}"
                )
        # One check at sizes other than those of the capture: a size of the capture could be a constant in the body.
        if any(sizes.get(name) != size for name, size in self.captured.items()):
            _RUN.add(self.key)
        _RESULTS.update(((call, index), value) for index, value in enumerate(found))
        return _returned(found)

    def _sizes(self, inputs: Sequence[torch.Tensor]) -> dict[str, int]:
        """The named sizes of ``inputs``."""
        shapes = [tuple(item.shape) for item in inputs]
        pairs = [pair for dims, shape in zip(self.dims, shapes, strict=True) for pair in zip(dims, shape, strict=False)]
        sizes = {dim: size for dim, size in pairs if isinstance(dim, str) and "*" not in dim}
        expected = [tuple(size_of(dim, sizes) for dim in dims) for dims in self.dims]
        for index, (shape, fits) in enumerate(zip(shapes, expected, strict=True)):
            if shape != fits or inputs[index].dtype != self.dtypes[index]:
                raise RuntimeError(
                    f"input {index} of {self.name} must be {self.dtypes[index]}{list(fits)}, "
                    f"got {inputs[index].dtype}{list(shape)}"
                )
        return sizes


def _returned(values: list[torch.Tensor]) -> torch.Tensor | tuple[torch.Tensor, ...]:
    return values[0] if len(values) == 1 else tuple(values)


# Keys (digests) of the bodies that passed the check at other sizes in this process. Equal keys mean equal bodies.
_RUN: set[str] = set()
# Fake results by key, settings and the kinds of the inputs: 30 equal layers need one call. A result lives as long as a
# node of some graph holds it.
_RESULTS: WeakValueDictionary[Hashable, torch.Tensor] = WeakValueDictionary()

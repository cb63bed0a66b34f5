"""The model's own forward over packed weights.

Linears are replaced where torch calls them (:mod:`speccompile.ops.cpu.rounded`). Experts are computed in many ways.
Those with packed weights compute with the package's op, as while the model is captured.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from threading import RLock

from torch import nn

from speccompile.graph_capture.altering import altering
from speccompile.graph_capture.experts import experts_captured, experts_chosen
from speccompile.ops.cpu import rounded
from speccompile.ops.cpu.packing import Pack, WeightPacks

# Threads change the same settings of a model.
_changing = RLock()


@contextlib.contextmanager
def as_packed(model: nn.Module, packs: WeightPacks) -> Iterator[None]:
    """In this context ``model`` computes what the packs do: what it would with rounded weights and inputs."""
    with _experts_by_op(model, packs), rounded.as_packed(packs):
        yield


@contextlib.contextmanager
def reading_packs(model: nn.Module, packs: Iterable[Pack]) -> Iterator[None]:
    """In this context ``model`` multiplies with the weights that are only in ``packs``. Without it, results are NaN."""
    packs = list(packs)
    with _experts_by_op(model, packs), rounded.reading_packs(packs) if packs else contextlib.nullcontext():
        yield


@contextlib.contextmanager
def inputs_unrounded(model: nn.Module, packs: WeightPacks) -> Iterator[None]:
    """In this context ``model`` and graphs that read the packs round weights but not inputs, see
    :func:`speccompile.ops.cpu.rounded.inputs_unrounded`."""
    with _experts_by_op(model, packs), rounded.inputs_unrounded(packs):
        yield


@contextlib.contextmanager
def _experts_by_op(model: nn.Module, packs: Iterable[Pack]) -> Iterator[None]:
    if all(pack.experts is None for pack in packs):
        yield
        return
    with _changing, altering(model), experts_chosen(model), experts_captured(model):
        yield

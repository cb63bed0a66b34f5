"""Fakes: tensors with a shape, a dtype and a device, and no values."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from speccompile.utils.build_lock import one_build
from speccompile.utils.torch_private import FakeTensorMode, OpOverload, fast_detach, pytree

# One mode for all graphs: traces of one graph are then valid in the others. One thread at a time may use it.
_MODE = FakeTensorMode()


@contextlib.contextmanager
def faking() -> Iterator[None]:
    """In this context torch's ops accept and return fakes. Only one thread at a time can be in it."""
    # Fakes are cached, and one from a caller's inference mode cannot be used outside of it.
    with one_build(), torch.inference_mode(False), _MODE, torch.no_grad():
        yield


@functools.lru_cache(maxsize=4096)
def fake(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A fake tensor. Equal arguments return the same object."""
    with faking():
        return torch.empty(shape, dtype=dtype, device=device)


def kind(value: Any) -> Hashable:
    """All properties of a fake, or of a size, that an op's result can depend on."""
    if not isinstance(value, torch.Tensor):
        return type(value), value
    return value.shape, value.dtype, value.stride(), value.storage_offset(), value.device


def of_kind(known: Any) -> Any:
    """A new fake, or a size, of the given :func:`kind`. Call it in :func:`faking`."""
    if len(known) == 2:
        return known[1]
    shape, dtype, stride, offset, device = known
    if not offset:
        return torch.empty_strided(shape, stride, dtype=dtype, device=device)
    extent = offset + 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))
    return torch.empty(extent, dtype=dtype, device=device).as_strided(shape, stride, offset)


def settings() -> Hashable:
    """The process-wide settings that results of ops depend on."""
    return torch.get_default_dtype(), torch.is_autocast_enabled("cpu"), torch.is_autocast_enabled("cuda")


@dataclass(frozen=True)
class _Call:
    """A call of ``op``. Calls with equal ``inputs_key`` and ``settings`` have the same fake result."""

    op: OpOverload
    inputs_key: Hashable
    settings: Hashable
    args: Sequence[Any] = field(compare=False)
    kwargs: Mapping[str, Any] = field(compare=False)


def result_of(op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """The fake result of ``op``. It is cached for inputs of equal :func:`kind`, since layers and tiers repeat the same
    calls."""
    return _result(_Call(op, _input_key([*args, *kwargs.items()]), settings(), args, kwargs))


@functools.lru_cache(maxsize=4096)
def _result(call: _Call) -> Any:
    with faking():
        return call.op(*call.args, **call.kwargs)


def new_result_of(op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """:func:`result_of` with fakes that no other call returns. Call it in :func:`faking`."""
    if _writes(op):
        # The result is one of the arguments.
        return op(*args, **kwargs)
    result = _result(_Call(op, _input_key([*args, *kwargs.items()]), settings(), args, kwargs))
    return pytree.tree_map_only(torch.Tensor, lambda item: fast_detach(_MODE, item), result)


@functools.cache
def _writes(op: OpOverload) -> bool:
    return bool(op._schema.is_mutable)


def _input_key(value: Any) -> Hashable:
    """The kinds of all tensors and sizes in ``value``, a tensor, a size, or a nested list of them."""
    if isinstance(value, list | tuple):
        return tuple(map(_input_key, value))
    return kind(value)

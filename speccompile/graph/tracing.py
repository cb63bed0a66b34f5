"""Tracing of functions of tensors as graphs. A function of this package is traced once in a process."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from speccompile.graph.fakes import faking, kind, of_kind
from speccompile.graph.recording import ConstantTensor, record
from speccompile.utils.stable_key import NoStableKey, stable_key
from speccompile.utils.torch_private import OpOverload, OpOverloadPacket, pytree


@dataclass(frozen=True)
class Trace:
    """A function as a graph that returns a flat tuple, and the structure of the function's result."""

    graph: fx.Graph
    structure: pytree.TreeSpec


@dataclass(frozen=True)
class Call:
    """A call of ``function``, with all properties that its trace depends on.

    Args:
        key: equal for calls with equal constants.
        kinds: the kinds (:func:`~speccompile.graph.fakes.kind`) of its tensors and sizes, in order.
        same: for each of them, the index of the first one that is the same node.
        dtype: torch's default dtype at the call.
        constants: the keyword arguments.
    """

    function: Callable[..., Any]
    key: Hashable
    kinds: tuple[Hashable, ...]
    same: tuple[int, ...]
    dtype: torch.dtype
    constants: Mapping[str, Any] = field(compare=False)


class Tracer:
    """Traces functions, and keeps the trace of each call.

    Functions from outside of this package, and constants without a stable key, are compared by identity. Their traces
    live as long as this tracer.
    """

    def __init__(self) -> None:
        self._own: dict[Call, Trace] = {}

    def trace(self, function: Callable[..., Any], nodes: Sequence[fx.Node], constants: Mapping[str, Any]) -> Trace:
        """The trace of ``function(*values, **constants)``, where ``values`` are those of ``nodes``.

        Raises:
            ValueError: the function creates a tensor from Python numbers.
        """
        kinds = tuple(kind(node.meta["val"]) for node in nodes)
        given = kinds, tuple(map(nodes.index, nodes)), torch.get_default_dtype(), constants
        try:
            return _kept(Call(function, _call_key(function, constants), *given))
        except NoStableKey:
            pass
        call = Call(function, tuple((name, type(value), value) for name, value in constants.items()), *given)
        try:
            known = self._own.get(call)
        except TypeError:
            # A constant is not hashable, so its trace cannot be kept.
            return _traced(call)
        if known is None:
            known = self._own[call] = _traced(call)
        return known


def _call_key(function: Callable[..., Any], constants: Mapping[str, Any]) -> str:
    """A key of the function and its constants.

    Raises:
        NoStableKey: one of them is not defined by torch or by this package.
    """
    known = isinstance(function, OpOverloadPacket | OpOverload)
    return json.dumps([stable_key(constants), None if known else stable_key(function)])


def _traced(call: Call) -> Trace:
    with faking():
        # A new fake for every node, since nodes can share fakes: a recording distinguishes its inputs by identity.
        own = {index: of_kind(call.kinds[index]) for index in set(call.same)}
        try:
            return Trace(*record(functools.partial(call.function, **call.constants), [own[i] for i in call.same]))
        except ConstantTensor as error:
            raise ValueError(
                f"{call.function.__name__} creates a tensor from Python numbers, which {error} reads; "
                "use torch.arange / torch.full, or a state tensor"
            ) from None


_kept = functools.lru_cache(maxsize=1024)(_traced)

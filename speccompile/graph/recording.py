"""Recording of the ops that a function calls on fakes, as a graph.

``make_fx`` records the same graph in three times the time: it also follows symbolic sizes, modules and constants.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from speccompile.graph.fakes import new_result_of
from speccompile.utils.torch_private import (
    OpOverload,
    TorchDispatchMode,
    autograd_would_have_decomposed,
    is_composite,
    pytree,
)

_composite = functools.cache(is_composite)


class ConstantTensor(Exception):
    """An op reads a tensor that is not an input and was not computed by another op. The argument is the op's name."""


def record(function: Callable[..., Any], inputs: Sequence[Any]) -> tuple[fx.Graph, pytree.TreeSpec]:
    """The ops of ``function(*inputs)`` as a graph that returns a flat tuple, and the structure of the result.

    Args:
        inputs: fakes and sizes. Each becomes a placeholder. If one object is given twice, its last placeholder is read.

    Raises:
        ConstantTensor: the function creates a tensor from Python numbers.
    """
    recorder = _Recorder()
    for index, value in enumerate(inputs):
        recorder.keep(recorder.graph.placeholder(f"input_{index}"), value)
    with recorder:
        results, structure = pytree.tree_flatten(function(*inputs))
    recorder.graph.output(tuple(recorder.nodes_of(results, "the result")))
    return recorder.graph, structure


class _Recorder(TorchDispatchMode):
    """While this mode is active, each call of an op becomes a node of ``graph``."""

    def __init__(self) -> None:
        super().__init__()
        self.graph = fx.Graph()
        # The newest node of each tensor, by identity. An op that writes a tensor in place replaces its node.
        self._nodes: dict[int, fx.Node] = {}
        # References that keep the tensors alive: only tensors that live at the same time have different ids.
        self._alive: list[torch.Tensor] = []

    def __torch_dispatch__(
        self, op: OpOverload, types: object, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if op is torch.ops.prim.device.default:
            return op(*args, **kwargs)
        if _composite(op) and autograd_would_have_decomposed(op, pytree.tree_leaves((args, kwargs))):
            # In inference mode autograd's dispatch keys are skipped, so they did not decompose it.
            with self:
                return op.decompose(*args, **kwargs)
        name = str(op)
        arguments, keywords = self.nodes_of(args, name), self.nodes_of(kwargs, name)
        result = new_result_of(op, args, kwargs)
        if op is torch.ops.aten.detach.default:
            # torch detaches the results of arange and similar ops. Without gradients the result is the tensor itself.
            self._track(result, arguments[0])
        else:
            # The label of __rshift__ is rshift.
            label = op.overloadpacket.__name__.removeprefix("__").removesuffix("__")
            node = self.graph.create_node("call_function", op, arguments, keywords, label)
            self.keep(node, result)
        return result

    def keep(self, node: fx.Node, value: Any) -> None:
        """Record that ``node`` computes ``value``."""
        node.meta["val"] = value
        if isinstance(value, torch.Tensor):
            self._track(value, node)
        elif isinstance(value, list | tuple):
            for index, item in enumerate(value):
                self.keep(self.graph.call_function(operator.getitem, (node, index)), item)

    def _track(self, tensor: torch.Tensor, node: fx.Node) -> None:
        self._nodes[id(tensor)] = node
        self._alive.append(tensor)

    def nodes_of(self, value: Any, reader: str) -> Any:
        """``value``, which is arguments or results, with each tensor replaced by its node.

        Raises:
            ConstantTensor: no node computes one of the tensors. ``reader`` is the name in the error.
        """
        if isinstance(value, torch.Tensor):
            if id(value) not in self._nodes:
                raise ConstantTensor(reader)
            return self._nodes[id(value)]
        if isinstance(value, list | tuple):
            return tuple(self.nodes_of(item, reader) for item in value)
        if isinstance(value, dict):
            return {name: self.nodes_of(item, reader) for name, item in value.items()}
        return value

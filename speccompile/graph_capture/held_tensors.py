"""Tensors that modules and hooks hold besides parameters and buffers: a steering vector, a table of positions.

A capture reads them as constants that share their memory, so steps follow changes in place. Another tensor in the same
place is not followed: it is looked for when a request comes.
"""

from __future__ import annotations

import functools
import operator
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig

from speccompile.errors import ModelChanged
from speccompile.graph_capture.rotary import changing_modules

_MODULE_FIELDS = frozenset(vars(nn.Module()))
_PLAIN = (type(None), bool, int, float, complex, str, bytes)
#: Values that lead to no tensor of a forward, or out of the model.
_CLOSED = (nn.Module, PreTrainedConfig, FunctionType, MethodType, ModuleType, type)
_PACKAGE = __name__.partition(".")[0]

Step = Callable[[Any], Any]


@dataclass(frozen=True)
class Place:
    """Where a tensor is held.

    Args:
        name: as Python writes it, from the model on.
        owner: the module, or the function of a hook.
        steps: lead from the owner to the tensor.
    """

    name: str
    owner: Any
    steps: tuple[Step, ...]

    def read(self) -> Any:
        """What is there now; None if the place is gone."""
        value = self.owner
        try:
            for step in self.steps:
                value = step(value)
        except (AttributeError, LookupError, TypeError, ValueError):
            return None
        return value


def held_by_modules(model: nn.Module) -> dict[str, torch.Tensor]:
    """By the name of each place. Modules whose own forward rewrites what they hold are left out."""
    return {place.name: tensor for place, tensor in _in_modules(model)}


class HeldTensors:
    """Places of ``model``, or of its hooks, that hold a tensor that steps read.

    Args:
        read: all tensors that steps read: weights and constants.
        hooks: all hooks that run with the model, by a name.
    """

    def __init__(
        self, model: nn.Module, read: Iterable[torch.Tensor], hooks: Iterable[tuple[str, Callable[..., Any]]]
    ) -> None:
        self._model = type(model).__name__
        by_address = {tensor.data_ptr(): tensor for tensor in read if tensor.numel()}
        found = [*_in_modules(model), *_in_hooks(hooks)]
        known = [(place, by_address[held.data_ptr()]) for place, held in found if held.data_ptr() in by_address]
        self._places = [(place, tensor) for place, tensor in known if _is_same(place.read(), tensor)]

    def check(self) -> None:
        """
        Raises:
            ModelChanged: a place holds another tensor, with other values.
        """
        for place, tensor in self._places:
            now = place.read()
            # A forward may build a table of its own anew, with the values that it had.
            if not _is_same(now, tensor) and not _is_equal(now, tensor):
                if isinstance(now, torch.Tensor):
                    what = f"the tensor {place.name} was replaced by another tensor (changing it in place is fine)"
                else:
                    what = f"the tensor {place.name} was removed"
                raise ModelChanged(model=self._model, what=what)


def _is_same(value: Any, tensor: torch.Tensor) -> bool:
    """Whether both are one piece of memory, read in one way."""
    return isinstance(value, torch.Tensor) and (
        (value.data_ptr(), value.shape, value.stride(), value.dtype)
        == (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype)
    )


def _is_equal(value: Any, tensor: torch.Tensor) -> bool:
    if not isinstance(value, torch.Tensor) or (value.shape, value.dtype) != (tensor.shape, tensor.dtype):
        return False
    return torch.equal(value.to(tensor.device), tensor)


# --- finding -------------------------------------------------------------------------------------


def _in_modules(model: nn.Module) -> Iterator[tuple[Place, torch.Tensor]]:
    rewritten = changing_modules(model)
    seen: set[int] = set()
    for path, module in model.named_modules():
        if path in rewritten:
            continue
        for name, value in vars(module).items():
            if name in _MODULE_FIELDS:
                continue
            place = Place(f"{path}.{name}".removeprefix("."), module, (operator.attrgetter(name),))
            yield from _below(place, value, seen, code=name == "forward")


def _in_hooks(hooks: Iterable[tuple[str, Callable[..., Any]]]) -> Iterator[tuple[Place, torch.Tensor]]:
    seen: set[int] = set()
    for name, hook in hooks:
        yield from _below(Place(name, hook, ()), hook, seen, code=True)


def _below(place: Place, value: Any, seen: set[int], *, code: bool) -> Iterator[tuple[Place, torch.Tensor]]:
    """The tensors that ``value`` leads to; ``code``: it is a function that runs in the forward, and what it closes over
    is looked at, too."""
    if type(value) in (torch.Tensor, nn.Parameter):
        yield place, value
        return
    if isinstance(value, _PLAIN) or id(value) in seen:
        return
    seen.add(id(value))
    for label, step, inner in _parts(value, code):
        below = Place(f"{place.name}{label}", place.owner, (*place.steps, step))
        yield from _below(below, inner, seen, code=code)


def _parts(value: Any, code: bool) -> Iterator[tuple[str, Step, Any]]:
    """What ``value`` holds: how that is written, how it is read, and itself."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield f"[{key!r}]", operator.itemgetter(key), inner
    elif isinstance(value, list | tuple | deque):
        for index, inner in enumerate(value):
            yield f"[{index}]", operator.itemgetter(index), inner
    elif code and isinstance(value, MethodType):
        for name in ("__self__", "__func__"):
            yield "", operator.attrgetter(name), getattr(value, name)
    elif code and isinstance(value, functools.partial):
        for name in ("func", "args", "keywords"):
            yield "" if name == "func" else f".{name}", operator.attrgetter(name), getattr(value, name)
    elif code and isinstance(value, FunctionType):
        for index, name in enumerate(value.__code__.co_freevars):
            step = functools.partial(_closed_over, index)
            with_value = _closed_over(index, value)
            yield f".{name}", step, with_value
    elif not isinstance(value, _CLOSED) and not type(value).__module__.startswith(f"{_PACKAGE}."):
        for name, inner in getattr(value, "__dict__", {}).items():
            yield f".{name}", operator.attrgetter(name), inner


def _closed_over(index: int, function: FunctionType) -> Any:
    """None for a name that has no value yet."""
    assert function.__closure__ is not None
    try:
        return function.__closure__[index].cell_contents
    except ValueError:
        return None

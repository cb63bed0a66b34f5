"""Tensors that modules and hooks hold, other than parameters and buffers: a steering vector, a table of positions.

A capture reads them as constants that share their memory, so steps follow changes in place. Steps do not follow a new
tensor under the same name. A check at each request detects it.
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
_SCALAR_TYPES = (type(None), bool, int, float, complex, str, bytes)
#: Values that hold no tensor of a forward, or are outside of the model.
_CLOSED = (nn.Module, PreTrainedConfig, FunctionType, MethodType, ModuleType, type)
_PACKAGE = __name__.partition(".")[0]

Step = Callable[[Any], Any]


@dataclass(frozen=True)
class TensorLocation:
    """The location at which a module or hook holds a tensor.

    Args:
        name: the expression for it, from the model on.
        owner: the module, or the function of a hook.
        getters: applied in turn to the owner, they return the tensor.
    """

    name: str
    owner: Any
    getters: tuple[Step, ...]

    def read(self) -> Any:
        """Return the current value; None if it was removed."""
        value = self.owner
        try:
            for getter in self.getters:
                value = getter(value)
        except (AttributeError, LookupError, TypeError, ValueError):
            return None
        return value


def held_by_modules(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the tensors by the names of their locations. Modules whose own forward rewrites them are left out."""
    return {location.name: tensor for location, tensor in _in_modules(model)}


class HeldTensors:
    """The locations, in ``model`` and its hooks, of tensors that steps read.

    Args:
        read: all tensors that steps read: weights and constants.
        hooks: all hooks that run with the model, with their names.
    """

    def __init__(
        self, model: nn.Module, read: Iterable[torch.Tensor], hooks: Iterable[tuple[str, Callable[..., Any]]]
    ) -> None:
        self._model = type(model).__name__
        by_address = {tensor.data_ptr(): tensor for tensor in read if tensor.numel()}
        found = [*_in_modules(model), *_in_hooks(hooks)]
        known = [(location, by_address[held.data_ptr()]) for location, held in found if held.data_ptr() in by_address]
        self._locations = [(location, tensor) for location, tensor in known if _is_same(location.read(), tensor)]

    def check(self) -> None:
        """Check that every location holds the captured tensor, or one with equal values.

        Raises:
            ModelChanged: a location holds another tensor with other values.
        """
        for location, tensor in self._locations:
            now = location.read()
            # A forward may rebuild a table with the same values.
            if not _is_same(now, tensor) and not _is_equal(now, tensor):
                if isinstance(now, torch.Tensor):
                    what = f"the tensor {location.name} was replaced by another tensor (changing it in place is fine)"
                else:
                    what = f"the tensor {location.name} was removed"
                raise ModelChanged(model=self._model, what=what)


def _is_same(value: Any, tensor: torch.Tensor) -> bool:
    """Whether both have the same memory, shape, strides and dtype."""
    return isinstance(value, torch.Tensor) and (
        (value.data_ptr(), value.shape, value.stride(), value.dtype)
        == (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype)
    )


def _is_equal(value: Any, tensor: torch.Tensor) -> bool:
    if not isinstance(value, torch.Tensor) or (value.shape, value.dtype) != (tensor.shape, tensor.dtype):
        return False
    return torch.equal(value.to(tensor.device), tensor)


# --- finding -------------------------------------------------------------------------------------


def _in_modules(model: nn.Module) -> Iterator[tuple[TensorLocation, torch.Tensor]]:
    rewritten = changing_modules(model)
    seen: set[int] = set()
    for path, module in model.named_modules():
        if path in rewritten:
            continue
        for name, value in vars(module).items():
            if name in _MODULE_FIELDS:
                continue
            location = TensorLocation(f"{path}.{name}".removeprefix("."), module, (operator.attrgetter(name),))
            yield from _find_tensors(location, value, seen, code=name == "forward")


def _in_hooks(hooks: Iterable[tuple[str, Callable[..., Any]]]) -> Iterator[tuple[TensorLocation, torch.Tensor]]:
    seen: set[int] = set()
    for name, hook in hooks:
        yield from _find_tensors(TensorLocation(name, hook, ()), hook, seen, code=True)


def _find_tensors(
    location: TensorLocation, value: Any, seen: set[int], *, code: bool
) -> Iterator[tuple[TensorLocation, torch.Tensor]]:
    """Yield all tensors that ``value`` holds. With ``code`` it is a function that runs in the forward, so the values
    that it closes over are searched, too."""
    if type(value) in (torch.Tensor, nn.Parameter):
        yield location, value
        return
    if isinstance(value, _SCALAR_TYPES) or id(value) in seen:
        return
    seen.add(id(value))
    for label, getter, inner in _parts(value, code):
        inner_location = TensorLocation(f"{location.name}{label}", location.owner, (*location.getters, getter))
        yield from _find_tensors(inner_location, inner, seen, code=code)


def _parts(value: Any, code: bool) -> Iterator[tuple[str, Step, Any]]:
    """Yield the members of ``value``: the expression, the getter and the member itself."""
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
            getter = functools.partial(_closed_over, index)
            with_value = _closed_over(index, value)
            yield f".{name}", getter, with_value
    elif not isinstance(value, _CLOSED) and not type(value).__module__.startswith(f"{_PACKAGE}."):
        for name, inner in getattr(value, "__dict__", {}).items():
            yield f".{name}", operator.attrgetter(name), inner


def _closed_over(index: int, function: FunctionType) -> Any:
    """Return the closed-over value at ``index``; None for a name that has no value yet."""
    assert function.__closure__ is not None
    try:
        return function.__closure__[index].cell_contents
    except ValueError:
        return None

"""Functions that several rows of a batch call. Each call is checked: it must not change what the function holds."""

from __future__ import annotations

import copy
import dis
import gc
import marshal
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from operator import getitem
from types import BuiltinMethodType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from speccompile.errors import InvalidInput, InvalidOption

#: Types that rows share: weights and vocabularies may be large.
LARGE = (torch.nn.Module, PreTrainedTokenizerBase)

_CLASS = (
    "give an object of a class derived from LogitsProcessor or StoppingCriteria, which is copied for each row, or send "
    "one row at a time"
)
_OPS = ("LOAD_GLOBAL", "STORE_GLOBAL", "DELETE_GLOBAL")


def reachable(called: Any) -> Iterator[Any]:
    """Yield every object that ``copy.deepcopy(called)`` may reach, and the objects that functions in it hold. Objects
    of :data:`LARGE` are yielded without their parts."""
    # The owner of a bound method is copied like an object, even if it is a module.
    owner = called.__self__ if isinstance(called, MethodType) else called
    left, seen = gc.get_referents(owner) if isinstance(owner, LARGE) else [owner], set()
    while left:
        value = left.pop()
        if id(value) in seen or isinstance(value, type | ModuleType | CodeType):
            continue
        seen.add(id(value))
        yield value
        if isinstance(value, FunctionType):
            left.extend(held.value for held in variables(value))
        elif isinstance(value, MethodType):
            left.append(value.__self__)
        elif not isinstance(value, LARGE):
            left.extend(gc.get_referents(value))


@dataclass(frozen=True)
class Variable:
    """An object that a function holds under a name: in its closure, a default, an attribute, or a global variable."""

    function: FunctionType
    name: str
    read: Callable[[], Any]

    @property
    def value(self) -> Any:
        """The object; None if the variable has no value yet."""
        try:
            return self.read()
        except (KeyError, ValueError):
            return None

    def __str__(self) -> str:
        return f"{self.name!r} of the function {self.function.__qualname__}"


def variables(function: FunctionType) -> Iterator[Variable]:
    """Yield the variables of ``function``."""
    code = function.__code__
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        yield Variable(function, name, partial(getattr, cell, "cell_contents"))
    defaults = function.__defaults__ or ()
    names = code.co_varnames[code.co_argcount - len(defaults) : code.co_argcount]
    values = {**dict(zip(names, defaults, strict=True)), **(function.__kwdefaults__ or {})}
    for name in values:
        yield Variable(function, name, partial(getitem, values, name))
    for name in function.__dict__:
        yield Variable(function, name, partial(getitem, function.__dict__, name))
    for name in _globals_named(code):
        value = function.__globals__.get(name)
        # A function of another module belongs to a library, and so do the names in it.
        if not isinstance(value, FunctionType) or value.__globals__ is function.__globals__:
            yield Variable(function, name, partial(getitem, function.__globals__, name))


def _globals_named(code: CodeType) -> set[str]:
    names = {item.argval for item in dis.get_instructions(code) if item.opname in _OPS}
    return names.union(*(_globals_named(item) for item in code.co_consts if isinstance(item, CodeType)))


class _Opaque(Exception):
    """A value whose changes cannot be detected."""


def _fingerprint(value: Any, alive: list[Any]) -> Any:
    """Return a fingerprint of ``value``. Two are equal if the value has not changed in between.

    Args:
        alive: receives the objects that are compared by their id, so no other object can get the same id.
    """
    alive.append(value)
    if isinstance(value, torch.Tensor):
        if value.is_inference():
            return value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        return id(value), value._version
    if isinstance(value, (FunctionType, ModuleType, type, torch.device, *LARGE)):
        return id(value)
    if isinstance(value, MethodType | BuiltinMethodType):
        return _fingerprint(value.__self__, alive)
    try:
        # Version 2 only depends on the value, not on its reference count.
        return marshal.dumps(value, 2)
    except ValueError:
        pass
    if isinstance(value, list | tuple | set | frozenset | deque):
        return id(value), [_fingerprint(item, alive) for item in value]
    if isinstance(value, dict):
        return id(value), [(_fingerprint(key, alive), _fingerprint(item, alive)) for key, item in value.items()]
    try:
        # True for enum members, loggers and compiled patterns.
        immutable = copy.deepcopy(value) is value
    except Exception:
        # The value's own code failed. The value may change, so it is refused.
        immutable = False
    if not immutable:
        raise _Opaque
    return id(value)


class SharedFunctions:
    """A callable whose functions are the given ones for every row, since Python copies no function.

    A function that only reads the objects that it holds returns the same for each row as in a separate call. A function
    that keeps state in them (a closure's list, a counter) would mix the rows, so a call that changes one is an error.

    A function holds the values of its closure, its defaults, its attributes and the global variables that it names.
    Numbers, strings, tensors, and lists, dicts and sets of them are compared before and after each call. Modules and
    tokenizers are not compared. Any other object may change undetected, so a function that holds one is refused at
    once.

    Args:
        name: the option's name, for messages.
        called: the row's own copy, or a function.
        held: variables of its functions.

    Raises:
        InvalidOption: a function holds an object that cannot be compared.
    """

    def __init__(self, name: str, called: Callable[..., Any], held: Sequence[Variable]) -> None:
        self._name, self._called, self._variables = name, called, held
        self.__name__ = getattr(called, "__name__", type(called).__name__)
        for variable in self._variables:
            try:
                _fingerprint(variable.value, [])
            except _Opaque:
                reason = (
                    f"{variable}, of type {type(variable.value).__name__}, would be shared by the rows of the batch, "
                    f"and may hold memory of one of them; {_CLASS}"
                )
                raise InvalidOption(where="generate", name=name, value=called, reason=reason) from None

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        before: list[Any] = []
        alive: list[Any] = []
        for variable in self._variables:
            before.append(_fingerprint(variable.value, alive))
        returned = self._called(*arguments, **keywords)
        for variable, expected in zip(self._variables, before, strict=True):
            if not _is_still(variable, expected):
                reason = (
                    f"a call changed {variable}, which all rows of the batch share: the state of one row would change "
                    f"the others; {_CLASS}"
                )
                raise InvalidInput(name=self._name, reason=reason)
        return returned


def _is_still(variable: Variable, expected: Any) -> bool:
    try:
        return bool(_fingerprint(variable.value, []) == expected)
    except _Opaque:
        return False

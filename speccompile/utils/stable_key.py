"""Stable keys: text that is equal for values that behave alike, in this process and in any other."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Mapping
from types import FunctionType, MethodType
from typing import Any

_PACKAGE = __name__.partition(".")[0]


class NoStableKey(Exception):
    """The value has no form for :func:`stable_key`."""


def stable_key(value: Any) -> Any:
    """Return JSON that is equal for values that behave alike, in this process and in any other.

    Raises:
        NoStableKey: the value has no such form, or it contains code from outside this package, whose dependencies are
            unknown.
    """
    # The repr of a subclass of a number (a Tree) identifies it.
    if value is None or isinstance(value, bool | int | float | str):
        return repr(value)
    if isinstance(value, tuple | list):
        return [stable_key(item) for item in value]
    if isinstance(value, set | frozenset):
        return sorted((stable_key(item) for item in value), key=repr)
    if isinstance(value, Mapping):
        return [[stable_key(key), stable_key(item)] for key, item in value.items()]
    if isinstance(value, functools.partial):
        return [stable_key(value.func), stable_key(value.args), stable_key(value.keywords)]
    if isinstance(value, MethodType):
        return [stable_key(value.__self__), stable_key(value.__func__)]
    if isinstance(value, FunctionType):
        if value.__closure__ is not None:
            raise NoStableKey(value)
        return _named(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        held = [stable_key(getattr(value, item.name)) for item in dataclasses.fields(value)]
        return [_named(type(value)), held]
    raise NoStableKey(value)


def _named(code: type | FunctionType) -> str:
    own = inspect.getmodule(code)
    if own is None or own.__name__.partition(".")[0] != _PACKAGE:
        raise NoStableKey(code)
    return f"{own.__name__}.{code.__qualname__}"

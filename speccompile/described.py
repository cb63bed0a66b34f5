"""Values as text that is equal for those that behave alike, in this process and in any other."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Mapping
from types import FunctionType, MethodType
from typing import Any


class NotDescribed(Exception):
    """A value that :func:`described` has no form for."""


def described(value: Any) -> Any:
    """JSON that is equal for values that behave alike, in this process and in any other.

    Raises:
        NotDescribed: there is no such form, or code from outside of this package is part of it, which reads whatever
            it likes.
    """
    if value is None or isinstance(value, bool | int | float | str):
        return repr(value)
    if isinstance(value, tuple | list):
        return [described(item) for item in value]
    if isinstance(value, Mapping):
        return [[described(key), described(item)] for key, item in value.items()]
    if isinstance(value, functools.partial):
        return [described(value.func), described(value.args), described(value.keywords)]
    if isinstance(value, MethodType):
        return [described(value.__self__), described(value.__func__)]
    if isinstance(value, FunctionType):
        if value.__closure__ is not None:
            raise NotDescribed(value)
        return _named(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        held = [described(getattr(value, item.name)) for item in dataclasses.fields(value)]
        return [_named(type(value)), held]
    raise NotDescribed(value)


def _named(code: type | FunctionType) -> str:
    own = inspect.getmodule(code)
    if own is None or own.__name__.partition(".")[0] != __name__.partition(".")[0]:
        raise NotDescribed(code)
    return f"{own.__name__}.{code.__qualname__}"

"""Values as text that is equal for those that behave alike, in this process and in any other."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import inspect
import sys
import sysconfig
from collections.abc import Mapping
from pathlib import Path
from types import FunctionType, MethodType, ModuleType
from typing import Any

_PACKAGE = __name__.partition(".")[0]
_INSTALLED = {Path(sysconfig.get_path(name)).resolve() for name in ("purelib", "platlib", "stdlib")}


class NoStableKey(Exception):
    """A value that :func:`stable_key` has no form for."""


def stable_key(value: Any) -> Any:
    """JSON that is equal for values that behave alike, in this process and in any other.

    Raises:
        NoStableKey: there is no such form, or code from outside of this package is part of it, which reads whatever
            it likes.
    """
    if value is None or isinstance(value, bool | int | float | str):
        return repr(value)
    if isinstance(value, tuple | list):
        return [stable_key(item) for item in value]
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


def own_code_key(value: Any) -> Any:
    """The same of an object of the user's own class: its attributes, and the digest of every file of the user's that
    the class's module imports from, that module's own included. Installed packages are known by their versions.

    Raises:
        NoStableKey: an attribute has no such form, or the code is in no file (typed into a console).
    """
    digests = [hashlib.sha256(file.read_bytes()).hexdigest() for file in sorted(_own_files(type(value)))]
    return [type(value).__qualname__, stable_key(vars(value)), digests]


def _own_files(cls: type) -> set[Path]:
    """Files that code of ``cls`` may come from, but for installed ones and those of this package."""
    found: set[Path] = set()
    waiting = [base.__module__ for base in cls.__mro__]
    seen = set(waiting)
    while waiting:
        module = sys.modules[waiting.pop()]
        name = module.__name__.partition(".")[0]
        if name == _PACKAGE or name in sys.stdlib_module_names:
            continue
        if getattr(module, "__file__", None) is None:
            raise NoStableKey(cls)
        file = Path(str(module.__file__)).resolve()
        if any(file.is_relative_to(folder) for folder in _INSTALLED):
            continue
        found.add(file)
        for held in vars(module).values():
            origin = held.__name__ if isinstance(held, ModuleType) else getattr(held, "__module__", None)
            if isinstance(origin, str) and origin in sys.modules and origin not in seen:
                seen.add(origin)
                waiting.append(origin)
    return found


def _named(code: type | FunctionType) -> str:
    own = inspect.getmodule(code)
    if own is None or own.__name__.partition(".")[0] != _PACKAGE:
        raise NoStableKey(code)
    return f"{own.__name__}.{code.__qualname__}"

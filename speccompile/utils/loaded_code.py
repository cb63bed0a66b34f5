"""Keys of loaded code, which may differ from the code in its file, and of the global values that it reads."""

from __future__ import annotations

from abc import ABC
from collections.abc import Callable, Iterable, Iterator
from types import CodeType, FunctionType, ModuleType
from typing import Any, Generic

from speccompile.utils.stable_key import NoStableKey, stable_key


def code_key(code: CodeType) -> Any:
    """Return JSON that is equal for code that computes the same from its arguments and globals."""
    constants = [code_key(item) if isinstance(item, CodeType) else _constant_key(item) for item in code.co_consts]
    return [code.co_code.hex(), code.co_names, code.co_varnames, constants]


def _constant_key(value: Any) -> str:
    return repr(sorted(map(repr, value))) if isinstance(value, frozenset) else repr(value)


def attributes(cls: type) -> Iterator[tuple[str, Any]]:
    """Names and values that ``cls`` itself defines, except special names and slots."""
    skipped = {*slots(cls), "_abc_impl"}
    return ((name, item) for name, item in vars(cls).items() if not name.startswith("__") and name not in skipped)


def slots(cls: type) -> list[str]:
    """Names of the slots that ``cls`` itself defines."""
    found = vars(cls).get("__slots__", ())
    return [name for name in ([found] if isinstance(found, str) else found) if not name.startswith("__")]


def functions(cls: type) -> list[FunctionType]:
    """Methods that ``cls`` itself defines."""
    return [item for _, item in attributes(cls) if isinstance(item, FunctionType)]


def reached(start: Iterable[FunctionType], is_users: Callable[[str], bool]) -> list[Any]:
    """Return JSON of the values of the global names in ``start``: the code of the user's functions and classes, and of
    those that they reach in turn; the values of numbers, strings and containers of these. Other values are left out.

    Args:
        is_users: whether a module of that name is followed.
    """
    found: dict[str, Any] = {}
    waiting = list(start)

    def visit(name: str, value: Any, used: frozenset[str]) -> None:
        if name in found:
            return
        if isinstance(value, ModuleType):
            if is_users(value.__name__):
                for own in sorted(used & vars(value).keys()):
                    visit(f"{value.__name__}.{own}", vars(value)[own], used)
        elif isinstance(value, FunctionType):
            if is_users(value.__module__):
                found[name] = code_key(value.__code__)
                waiting.append(value)
        elif isinstance(value, type):
            if is_users(value.__module__) and value not in (object, ABC, Generic):
                found[name] = [[own.__name__, code_key(own.__code__)] for own in functions(value)]
                waiting.extend(functions(value))
        else:
            try:
                found[name] = stable_key(value)
            except NoStableKey:
                return

    while waiting:
        function = waiting.pop()
        used = _names(function.__code__)
        for name in sorted(used & function.__globals__.keys()):
            visit(f"{function.__module__}.{name}", function.__globals__[name], used)
    return sorted(found.items())


def _names(code: CodeType) -> frozenset[str]:
    """Return global names and attributes in ``code`` and the code inside it."""
    inner = [_names(item) for item in code.co_consts if isinstance(item, CodeType)]
    return frozenset(code.co_names).union(*inner)

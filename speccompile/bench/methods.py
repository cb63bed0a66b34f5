"""Methods with the modes and options that ``wrap`` receives for them, drafters by import path among them."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pkgutil import resolve_name
from typing import Any, NoReturn

from torch import nn

from speccompile.bench.method_names import MethodName
from speccompile.errors import InvalidOption, error_line
from speccompile.modes import Mode, create, register
from speccompile.modes.registry import options_of

_HOST_ARGUMENTS, _STEP_ARGUMENTS = 2, 3


@dataclass(frozen=True)
class Method:
    """A drafter, or several of them composed.

    Args:
        name: the name in tables.
        mode: the argument of ``wrap``.
        options: options of the mode.
    """

    name: str
    mode: str | list[str]
    options: Mapping[str, Any]


def resolve_methods(named: Sequence[MethodName], options: Mapping[str, Any]) -> list[Method]:
    """Resolve methods, and check them before a model is loaded.

    Args:
        options: options of modes. Each method receives those that it accepts.

    Raises:
        UnknownMode, InvalidOption: a method does not exist, or accepts no source.
        InvalidOption: no method accepts one of ``options``.
    """
    methods = [_resolve(method, options) for method in named]
    for name, value in options.items():
        if not any(name in method.options for method in methods):
            reason = f"it is neither an option of wrap nor of one of the methods {[method.name for method in methods]}"
            raise InvalidOption(where="the command line", name="--option", value=f"{name}={value}", reason=reason)
    return methods


def _resolve(method: MethodName, given: Mapping[str, Any]) -> Method:
    modes, options = [], dict[str, Any]()
    for text in method.modes:
        name, own = (text, {}) if ":" not in text else _imported(method, text)
        modes.append(name)
        options |= own
    mode: str | list[str] = modes if len(modes) > 1 else modes[0]
    known = options_of(modes)
    options |= {name: value for name, value in given.items() if name in known}
    if method.source is not None:
        if "draft" not in known:
            _refuse(method, "its mode loads neither a head nor a draft model; leave out the part after =")
        options["draft"] = method.source
    try:
        create(mode, dict(options))
    except TypeError as error:
        _refuse(method, f"its mode cannot be created ({error_line(error)}); give its options with --option")
    return Method(method.name, mode, options)


def _imported(method: MethodName, path: str) -> tuple[str, dict[str, Any]]:
    """The name and the options of the drafter at an import path. A class of a mode is registered by its path."""
    try:
        found = resolve_name(path)
    except (ImportError, AttributeError, ValueError) as error:
        _refuse(method, f"{path!r} cannot be imported ({error_line(error)}); the current folder is searched, too")
    if isinstance(found, type) and issubclass(found, Mode):
        register(path, found, replace=True)
        return path, {}
    try:
        drafter = found() if isinstance(found, type) else found
    except TypeError as error:
        _refuse(method, f"{path!r} cannot be created without arguments ({error_line(error)})")
    if isinstance(drafter, nn.Module):
        drafter.eval()
    return "user_provided", {"draft": drafter, "host": _count_arguments(method, path, drafter) == _HOST_ARGUMENTS}


def _count_arguments(method: MethodName, path: str, drafter: Any) -> int:
    call = drafter.forward if isinstance(drafter, nn.Module) else drafter
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    count = 0
    if callable(call):
        parameters = inspect.signature(call).parameters.values()
        count = sum(item.kind in kinds and item.default is item.empty for item in parameters)
    if count not in (_HOST_ARGUMENTS, _STEP_ARGUMENTS):
        reason = (
            f"{path!r} must be a subclass of speccompile.modes.Mode, draft(tokens, draft_len) on the host, or "
            "draft(tokens, length, draft_len) as a part of the step"
        )
        _refuse(method, reason)
    return count


def _refuse(method: MethodName, reason: str) -> NoReturn:
    raise InvalidOption(where="the command line", name="--method", value=method.text, reason=reason)

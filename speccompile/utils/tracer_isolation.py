"""Isolation of torch's tracers. They change the process, while other threads may run models."""

from __future__ import annotations

import contextlib
import copy
import functools
import io
import logging
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any, TextIO, TypeVar

import torch
from torch import nn

from speccompile.utils.torch_private import compile_lock, symbolic_trace

Module = TypeVar("Module", bound=nn.Module)

_COPIED_AS_ONE = (type, FunctionType, BuiltinFunctionType, str, bytes, int, float, complex, ModuleType)

logger = logging.getLogger("speccompile")


class _OwnPatcher(symbolic_trace._Patcher):
    """Patches ``nn.Module`` like torch's patcher, but only for calls of the thread that traces."""

    def __init__(self) -> None:
        super().__init__()
        # torch has just set this flag for the process. This package does not read it. A compiled function that another
        # thread calls would refuse to run.
        symbolic_trace._is_fx_tracing_flag = False

    def patch_method(self, cls: type, name: str, new_fn: Callable[..., Any], deduplicate: bool = True) -> None:
        super().patch_method(cls, name, _in_this_thread(new_fn, getattr(cls, name)), deduplicate)


def _in_this_thread(function: Callable[..., Any], elsewhere: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that calls ``function`` in the current thread, and ``elsewhere`` in any other."""
    owner = threading.get_ident()

    @functools.wraps(function)
    def chosen(*args: Any, **kwargs: Any) -> Any:
        return (function if threading.get_ident() == owner else elsewhere)(*args, **kwargs)

    return chosen


@contextlib.contextmanager
def traced_alone() -> Iterator[None]:
    """Limit the patches of ``nn.Module`` by torch's tracers to the current thread. One thread at a time may enter."""
    before = symbolic_trace._Patcher
    symbolic_trace._Patcher = _OwnPatcher  # type: ignore[misc]
    try:
        yield
    finally:
        symbolic_trace._Patcher = before  # type: ignore[misc]


@contextlib.contextmanager
def exported_alone() -> Iterator[None]:
    """:func:`traced_alone`, in which ``torch.compiler.is_compiling()`` and ``is_exporting()`` are only true in the
    current thread. A ``torch.compile`` of another thread waits, since it sets the same flags."""
    compiler, names = torch.compiler, ("is_compiling", "is_exporting")
    before = {name: getattr(compiler, name) for name in names}
    with compile_lock, traced_alone():
        try:
            for name, function in before.items():
                setattr(compiler, name, _in_this_thread(function, _never))
            yield
        finally:
            for name, function in before.items():
                setattr(compiler, name, function)


def _never() -> bool:
    return False


@contextlib.contextmanager
def silenced() -> Iterator[None]:
    """Drop the current thread's output to stderr. The output of other threads is not changed."""
    with contextlib.redirect_stderr(_Silenced(sys.stderr)):
        yield


class _Silenced(io.TextIOBase):
    def __init__(self, beyond: TextIO) -> None:
        super().__init__()
        self._beyond, self._owner = beyond, threading.get_ident()

    def write(self, text: str) -> int:
        return len(text) if threading.get_ident() == self._owner else self._beyond.write(text)

    def flush(self) -> None:
        self._beyond.flush()


def copy_over_same_tensors(module: Module) -> Module:
    """Copy the tree of ``module`` over the same tensors. A capture sets attributes, adds hooks and replaces weights by
    fakes. If it changes the copy, another thread may run ``module`` meanwhile.

    If the tree cannot be copied, the result is ``module`` itself, and the log has a line.
    """
    try:
        return copy.deepcopy(module, shared_with_copy(module))
    except Exception as error:
        logger.info("%s cannot be copied (%s): do not run it while it is captured", type(module).__name__, error)
        return module


def shared_with_copy(module: nn.Module) -> dict[int, Any]:
    """Return the objects that a copy shares with ``module``, by id, as a memo of ``copy.deepcopy``. They are all
    tensors that a copy would reach, also in hooks and lists, so a change in place changes both."""
    shared: dict[int, Any] = {}
    seen: dict[int, Any] = {}
    found: list[Any] = [module]
    while found:
        value = found.pop()
        if id(value) in seen:
            continue
        seen[id(value)] = value
        if isinstance(value, torch.Tensor):
            shared[id(value)] = value
            continue
        held = _held(value)
        if isinstance(value, nn.Module):
            # For example a ``generate`` that was assigned to the model: it refers to objects outside of the model.
            outside = [each for each in held if isinstance(each, MethodType) and not _is_method_of_module(each)]
            shared |= {id(each): each for each in outside}
            held = [each for each in held if id(each) not in shared]
        found += held
    return shared


def _held(value: Any) -> list[Any]:
    """Return the objects that ``copy.deepcopy`` copies with ``value``."""
    if isinstance(value, _COPIED_AS_ONE):
        return []
    if isinstance(value, MethodType):
        return [value.__self__]
    held: list[Any] = list(getattr(value, "__dict__", {}).values())
    if isinstance(value, functools.partial):
        held += [value.func, *value.args, *value.keywords.values()]
    elif isinstance(value, Mapping):
        held += value.values()
    elif isinstance(value, list | tuple | set | frozenset | deque):
        held += value
    return held


def _is_method_of_module(method: MethodType) -> bool:
    return isinstance(method.__self__, nn.Module)

"""Keeps what torch's tracers change in the process away from other threads, which may run models meanwhile."""

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
    """Patches ``nn.Module`` as torch's does, for calls of the thread that traces."""

    def __init__(self) -> None:
        super().__init__()
        # torch sets the flag for the process just before. Nothing here reads it; a compiled function that another
        # thread calls would refuse to run.
        symbolic_trace._is_fx_tracing_flag = False

    def patch_method(self, cls: type, name: str, new_fn: Callable[..., Any], deduplicate: bool = True) -> None:
        super().patch_method(cls, name, _in_this_thread(new_fn, getattr(cls, name)), deduplicate)


def _in_this_thread(function: Callable[..., Any], elsewhere: Callable[..., Any]) -> Callable[..., Any]:
    """``function`` for calls of the present thread, ``elsewhere`` for those of any other."""
    owner = threading.get_ident()

    @functools.wraps(function)
    def chosen(*args: Any, **kwargs: Any) -> Any:
        return (function if threading.get_ident() == owner else elsewhere)(*args, **kwargs)

    return chosen


@contextlib.contextmanager
def traced_alone() -> Iterator[None]:
    """What torch's tracers do to ``nn.Module`` inside holds for the present thread. One thread at a time."""
    before = symbolic_trace._Patcher
    symbolic_trace._Patcher = _OwnPatcher  # type: ignore[misc]
    try:
        yield
    finally:
        symbolic_trace._Patcher = before  # type: ignore[misc]


@contextlib.contextmanager
def exported_alone() -> Iterator[None]:
    """:func:`traced_alone`, and ``torch.compiler.is_compiling()`` and ``is_exporting()`` are true of the present thread
    only. A ``torch.compile`` of another thread waits, since it raises the same flags."""
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
    """Drop what the present thread prints to stderr; other threads' output goes where it went."""
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


def module_twin(module: Module) -> Module:
    """The tree of ``module`` once more, over the same tensors. A capture sets attributes, adds hooks and puts fakes in
    the place of weights: with a twin, another thread may run ``module`` meanwhile.

    A tree that cannot be copied is its own twin; the log says so.
    """
    try:
        return copy.deepcopy(module, shared_with_twin(module))
    except Exception as error:
        logger.info("%s cannot be copied (%s): do not run it while it is captured", type(module).__name__, error)
        return module


def shared_with_twin(module: nn.Module) -> dict[int, Any]:
    """What a twin has in common with ``module``, by id, as a memo of ``copy.deepcopy``: all tensors that a copy would
    reach, those of hooks and of lists too, so that a change in place is a change of both."""
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
            # Such as a ``generate`` that was put into the model: it leads out of it.
            outside = [each for each in held if isinstance(each, MethodType) and not _is_method_of_module(each)]
            shared |= {id(each): each for each in outside}
            held = [each for each in held if id(each) not in shared]
        found += held
    return shared


def _held(value: Any) -> list[Any]:
    """What ``copy.deepcopy`` copies with ``value``."""
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

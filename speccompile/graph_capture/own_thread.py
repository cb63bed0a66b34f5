"""Keeps what torch's tracers change in the process away from other threads, which may run models meanwhile."""

from __future__ import annotations

import contextlib
import copy
import functools
import io
import logging
import sys
import threading
from collections.abc import Callable, Iterator
from types import MethodType
from typing import Any, TextIO, TypeVar

import torch
from torch import nn
from torch.fx import _symbolic_trace

Module = TypeVar("Module", bound=nn.Module)

logger = logging.getLogger("speccompile")


class _OwnPatcher(_symbolic_trace._Patcher):
    """Patches ``nn.Module`` as torch's does, for calls of the thread that traces."""

    def __init__(self) -> None:
        super().__init__()
        # torch sets the flag for the process just before. Nothing here reads it; a compiled function that another
        # thread calls would refuse to run.
        _symbolic_trace._is_fx_tracing_flag = False

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
    before = _symbolic_trace._Patcher
    _symbolic_trace._Patcher = _OwnPatcher  # type: ignore[misc]
    try:
        yield
    finally:
        _symbolic_trace._Patcher = before  # type: ignore[misc]


@contextlib.contextmanager
def exported_alone() -> Iterator[None]:
    """:func:`traced_alone`, and ``torch.compiler.is_compiling()`` and ``is_exporting()`` are true of the present thread
    only. A ``torch.compile`` of another thread waits, since it raises the same flags."""
    compiler, names = torch.compiler, ("is_compiling", "is_exporting")
    before = {name: getattr(compiler, name) for name in names}
    # torch.export imports it anyway.
    from torch._dynamo.convert_frame import compile_lock

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
def unheard() -> Iterator[None]:
    """Drop what the present thread prints to stderr; other threads' output goes where it went."""
    with contextlib.redirect_stderr(_Unheard(sys.stderr)):
        yield


class _Unheard(io.TextIOBase):
    def __init__(self, beyond: TextIO) -> None:
        super().__init__()
        self._beyond, self._owner = beyond, threading.get_ident()

    def write(self, text: str) -> int:
        return len(text) if threading.get_ident() == self._owner else self._beyond.write(text)

    def flush(self) -> None:
        self._beyond.flush()


def twin(module: Module) -> Module:
    """The tree of ``module`` once more, over the same tensors. A capture sets attributes, adds hooks and puts fakes in
    the place of weights: with a twin, another thread may run ``module`` meanwhile.

    A tree that cannot be copied is its own twin; the log says so.
    """
    kept: dict[int, Any] = {}
    for part in module.modules():
        for held in (vars(part), part._parameters, part._buffers):
            kept |= {id(value): value for value in held.values() if _is_shared(value)}
    try:
        return copy.deepcopy(module, kept)
    except Exception as error:
        logger.info("%s cannot be copied (%s): do not run it while it is captured", type(module).__name__, error)
        return module


def _is_shared(value: Any) -> bool:
    # A method of something else than a module, such as a ``generate`` that was put into the model, leads out of it.
    leads_out = isinstance(value, MethodType) and not isinstance(value.__self__, nn.Module)
    return leads_out or isinstance(value, torch.Tensor)

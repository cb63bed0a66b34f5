"""Warnings at the line of the caller's own code."""

from __future__ import annotations

import contextlib
import sys
import threading
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

PACKAGE = __name__.partition(".")[0]
#: The commands are callers of the package.
COMMANDS = f"{PACKAGE}.cli"
#: Context managers stand between frames of this package.
PASSED_OVER = (PACKAGE, "contextlib")
#: What calls the first function of a thread.
THREADS = ("threading", "concurrent.futures.thread")


@dataclass(frozen=True)
class Place:
    """Where a warning is shown, as ``warnings.warn_explicit`` accepts it."""

    filename: str
    line: int
    module: str
    registry: dict[Any, Any] = field(repr=False)


_threads = threading.local()


def calling_line() -> Place:
    """The line that called into this package, however deep this call is: in a thread that this package started, the
    place given to :func:`on_behalf_of`; where no code of the caller's is on the stack, the outermost line of this
    package."""
    frame = sys._getframe(1)
    while (outer := frame.f_back) is not None and _passed_over(frame):
        if _module(outer) in THREADS:
            place: Place | None = getattr(_threads, "place", None)
            return _place(frame) if place is None else place
        frame = outer
    return _place(frame)


def _module(frame: FrameType) -> str:
    name: str = frame.f_globals.get("__name__", "")
    return name


def _passed_over(frame: FrameType) -> bool:
    name = _module(frame)
    return name.partition(".")[0] in PASSED_OVER and not f"{name}.".startswith(f"{COMMANDS}.")


def _place(frame: FrameType) -> Place:
    registry = frame.f_globals.setdefault("__warningregistry__", {})
    return Place(frame.f_code.co_filename, frame.f_lineno, _module(frame), registry)


@contextlib.contextmanager
def on_behalf_of(place: Place) -> Iterator[None]:
    """In a thread that this package started: show warnings at ``place``, the :func:`calling_line` of before."""
    _threads.place = place
    try:
        yield
    finally:
        del _threads.place


def warn_caller(message: str, category: type[Warning] = UserWarning) -> None:
    """Warn at the :func:`calling_line`."""
    place = calling_line()
    warnings.warn_explicit(message, category, place.filename, place.line, place.module, place.registry)

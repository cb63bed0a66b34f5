"""Warnings at the line of the caller's code."""

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
#: The command line counts as a caller of the package.
COMMANDS = f"{PACKAGE}.cli"
#: Modules whose frames are skipped. Context managers are between frames of this package.
SKIPPED_MODULES = (PACKAGE, "contextlib")
#: The modules that call the first function of a thread.
THREADS = ("threading", "concurrent.futures.thread")


@dataclass(frozen=True)
class CallSite:
    """The line at which a warning is shown, with the arguments of ``warnings.warn_explicit``."""

    filename: str
    line: int
    module: str
    registry: dict[Any, Any] = field(repr=False)


_threads = threading.local()


def calling_line() -> CallSite:
    """Return the line that called into this package, at any depth. In a thread that this package started, it is the
    site given to :func:`on_behalf_of`. Without a frame of the caller it is the outermost line of this package."""
    frame = sys._getframe(1)
    while (outer := frame.f_back) is not None and _is_skipped(frame):
        if _module(outer) in THREADS:
            site: CallSite | None = getattr(_threads, "site", None)
            return _call_site(frame) if site is None else site
        frame = outer
    return _call_site(frame)


def _module(frame: FrameType) -> str:
    name: str = frame.f_globals.get("__name__", "")
    return name


def _is_skipped(frame: FrameType) -> bool:
    name = _module(frame)
    return name.partition(".")[0] in SKIPPED_MODULES and not f"{name}.".startswith(f"{COMMANDS}.")


def _call_site(frame: FrameType) -> CallSite:
    registry = frame.f_globals.setdefault("__warningregistry__", {})
    return CallSite(frame.f_code.co_filename, frame.f_lineno, _module(frame), registry)


@contextlib.contextmanager
def on_behalf_of(site: CallSite) -> Iterator[None]:
    """Show warnings at ``site``, an earlier :func:`calling_line`, in a thread that this package started."""
    _threads.site = site
    try:
        yield
    finally:
        del _threads.site


def warn_caller(message: str, category: type[Warning] = UserWarning) -> None:
    """Warn at the :func:`calling_line`."""
    site = calling_line()
    warnings.warn_explicit(message, category, site.filename, site.line, site.module, site.registry)

"""Modes by name: those of this package, those registered from outside, and those of installed packages."""

from __future__ import annotations

from importlib.metadata import entry_points
from typing import Any

from speccompile.errors import DuplicateMode, InvalidOption, UnknownMode, UnknownOption
from speccompile.modes.base import Mode
from speccompile.modes.early_exit import EarlyExit
from speccompile.modes.ngram import NGram
from speccompile.modes.none import NoSpeculation

ENTRY_POINTS = "speccompile.modes"

_modes: dict[str, type[Mode]] = {mode.name: mode for mode in (NoSpeculation, NGram, EarlyExit)}


def register(name: str, mode: type[Mode], *, replace: bool = False) -> None:
    """Make ``mode`` known as ``name``, in any case.

    Raises:
        DuplicateMode: the name is taken and ``replace`` is not given.
        InvalidOption: ``mode`` is not a subclass of :class:`Mode`.
    """
    if not (isinstance(mode, type) and issubclass(mode, Mode)):
        raise InvalidOption(
            where="register_mode",
            name="mode",
            value=mode,
            reason="it is no subclass of speccompile.modes.Mode",
        )
    key = name.lower()
    if key in _modes and not replace:
        raise DuplicateMode(name=key, owner=f"{_modes[key].__module__}.{_modes[key].__qualname__}")
    _modes[key] = mode


def _known() -> dict[str, type[Mode]]:
    known = dict(_modes)
    for point in entry_points(group=ENTRY_POINTS):
        if point.name.lower() not in known:
            known[point.name.lower()] = point.load()
    return known


def available() -> list[str]:
    """Names that ``wrap(mode=...)`` takes."""
    return sorted(_known())


def create(name: str | None, options: dict[str, Any]) -> Mode:
    """The mode called ``name`` (any case; None is ``none``), with its options.

    Raises:
        UnknownMode: there is none of that name.
        UnknownOption: it does not take one of the options.
        InvalidOption: a value is not valid.
    """
    known = _known()
    key = "none" if name is None else str(name).lower()
    if key not in known:
        raise UnknownMode(name=name, available=", ".join(sorted(known)))
    mode = known[key]
    if unknown := sorted(options.keys() - set(mode.options())):
        raise UnknownOption(
            where=f"wrap(mode={key!r})",
            names=", ".join(unknown),
            known=", ".join(mode.options()) or "no options of its own",
        )
    return mode(**options)

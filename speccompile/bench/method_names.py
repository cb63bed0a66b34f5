"""Methods by the texts of ``--method``. Nothing here imports torch: the command line checks them before that."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from speccompile.errors import InvalidOption

#: Names of the two lines that every table has, or can have, without a method.
PLAIN, TRANSFORMERS = "K=0", "transformers generate"


@dataclass(frozen=True)
class MethodName:
    """The parts of ``MODE[+MODE...][=FOLDER]``.

    Args:
        text: the whole text.
        modes: names of modes, or import paths, which contain a colon.
        source: the folder or the hub id of a head or draft model; None if there is not one.
    """

    text: str
    modes: tuple[str, ...]
    source: str | None

    @property
    def name(self) -> str:
        """The name in tables: of the source only the last part, which is the same on all machines."""
        modes = "+".join(self.modes)
        return modes if self.source is None else f"{modes}={Path(self.source).resolve().name}"

    @property
    def registered(self) -> list[str]:
        """Those of its modes that are names, not import paths."""
        return [mode for mode in self.modes if ":" not in mode]


def read_methods(texts: Sequence[str]) -> tuple[MethodName, ...]:
    """Parse ``["ngram", "suffix+eagle3=FOLDER", "my.module:MyDrafter"]``.

    Raises:
        InvalidOption: a text has another form, or two methods have the same name.
    """
    methods = tuple(_read(text) for text in texts)
    names = [method.name for method in methods]
    for method in methods:
        if names.count(method.name) > 1:
            _refuse(method.text, f"two methods have the name {method.name!r}; give each once")
    return methods


def _read(text: str) -> MethodName:
    head, equals, source = text.partition("=")
    modes = tuple(mode.strip() for mode in head.split("+"))
    if not all(modes) or (equals and not source):
        _refuse(text, "write it as MODE, MODE+MODE, MODE=FOLDER or my.module:MyDrafter")
    if modes == ("none",):
        _refuse(text, f"a run always has the line {PLAIN}; leave it out")
    return MethodName(text, modes, source or None)


def _refuse(text: str, reason: str) -> NoReturn:
    raise InvalidOption(where="the command line", name="--method", value=text, reason=reason)

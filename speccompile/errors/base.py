"""Base classes of all errors, and the form in which a message shows a value."""

from __future__ import annotations

import reprlib
import string
import sys
from typing import Any, ClassVar

#: Characters of a value that a message shows: a list of hundreds of token ids would hide the reason after it.
LONGEST_VALUE = 200


class _Brief(reprlib.Repr):
    """``repr`` that shows only the kind of tensors and modules, not the values or the tree of submodules."""

    def __init__(self) -> None:
        super().__init__()
        self.maxlist = self.maxtuple = self.maxset = self.maxfrozenset = self.maxdict = LONGEST_VALUE
        self.maxstring = self.maxother = self.maxlong = 10 * LONGEST_VALUE

    def repr1(self, x: Any, level: int) -> str:
        # Without torch there are no tensors, and the command line prints errors without loading it.
        torch = sys.modules.get("torch")
        if torch is not None and isinstance(x, torch.nn.Module):
            return f"<{type(x).__name__}>"
        if torch is not None and isinstance(x, torch.Tensor):
            return f"<{type(x).__name__} {x.dtype} {list(x.shape)}>"
        return super().repr1(x, level)

    def repr_int(self, x: int, level: int) -> str:
        # Python raises for an int of thousands of digits.
        return super().repr_int(x, level) if x.bit_length() <= 4 * LONGEST_VALUE else f"<int of {x.bit_length()} bits>"


_BRIEF = _Brief()


def shown(value: Any) -> str:
    """``repr(value)``, clipped to the length that a message shows."""
    return clipped(_BRIEF.repr(value))


def clipped(text: str, most: int = LONGEST_VALUE) -> str:
    """The first ``most`` characters of ``text``, and dots if there are more."""
    return text if len(text) <= most else f"{text[:most]}..."


class _Formatter(string.Formatter):
    """``str.format`` whose ``!r`` is :func:`shown`."""

    def convert_field(self, value: Any, conversion: Any) -> Any:
        return shown(value) if conversion == "r" else super().convert_field(value, conversion)


_FORMATTER = _Formatter()


class SpecCompileError(Exception):
    """Base of all errors of this package. The keyword arguments fill ``template``."""

    template: ClassVar[str] = "{message}"

    def __init__(self, message: str | None = None, **fields: Any) -> None:
        self.fields = fields
        super().__init__(_FORMATTER.format(self.template, **fields) if message is None else message)


def error_line(error: Exception) -> str:
    """Kind and first two lines of another library's error (torch may append a whole graph), as part of a sentence."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {' '.join(lines[:2])}".rstrip(".!: ")


class UserError(SpecCompileError, ValueError):
    """The arguments are not valid or cannot be combined; the caller must change them."""

"""Options of ``make_texts``. This module does not import torch, so the command line can show and check them first.

``python -m speccompile.training.text_options`` prints the table of docs/reference/options.md.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from speccompile.errors import InvalidOption
from speccompile.utils.numbers import is_real, python_numbers
from speccompile.utils.options import Options, WholeNumber, flag_or_none, option


@dataclass(frozen=True)
class Number:
    """Check for a finite number of at least ``least`` and at most ``most``."""

    least: float
    most: float = math.inf

    def __call__(self, where: str, name: str, value: Any) -> float:
        """Return ``value`` as a float. Raises InvalidOption."""
        number = python_numbers(value)
        good = is_real(number) and math.isfinite(number)
        if not (good and self.least <= number <= self.most):
            bound = f" and at most {self.most:g}" if self.most < math.inf else ""
            reason = f"it must be a number of at least {self.least:g}{bound}"
            raise InvalidOption(where=where, name=name, value=value, reason=reason)
        return float(number)


def _files(where: str, name: str, value: Any) -> tuple[Path, ...]:
    """Convert to paths. Raises InvalidOption if a file is missing."""
    values = [value] if isinstance(value, str | Path) else value
    if not isinstance(values, Sequence) or not all(isinstance(path, str | Path) for path in values):
        raise InvalidOption(where=where, name=name, value=value, reason="give paths of files")
    if missing := next((path for path in map(Path, values) if not path.is_file()), None):
        raise InvalidOption(where=where, name=name, value=str(missing), reason="there is no such file")
    return tuple(map(Path, values))


@dataclass(frozen=True)
class TextOptions(Options):
    """Options of :func:`speccompile.training.make_texts`.

    Raises:
        InvalidOption: a value is not valid.
    """

    where: ClassVar[str] = "make_texts"

    tokens: int = field(
        default=1_000_000,
        metadata=option("Tokens of all texts together, the chat template's included.", WholeNumber(1)),
    )
    seed: int = field(default=0, metadata=option("Seed of all draws.", WholeNumber(0)))
    temperature: float = field(default=0.7, metadata=option("Temperature of the answers; 0 is greedy.", Number(0)))
    top_p: float = field(
        default=0.95, metadata=option("Answers: keep the likeliest tokens of this mass.", Number(0, 1))
    )
    user_temperature: float = field(
        default=0.9, metadata=option("Temperature of the user turns that the target writes.", Number(0))
    )
    user_top_p: float = field(
        default=0.95, metadata=option("User turns: keep the likeliest tokens of this mass.", Number(0, 1))
    )
    max_user_tokens: int = field(default=256, metadata=option("Longer user turns are dropped.", WholeNumber(1)))
    max_answer_tokens: int = field(default=512, metadata=option("Longer answers end there.", WholeNumber(1)))
    prompts: Sequence[str | Path] = field(
        default=(), metadata=option("Files of user turns, one for each line, or JSON lines.", _files)
    )
    draw: bool | None = field(
        default=None,
        metadata=option(
            "Whether the target writes user turns after those of `prompts`; by default if `prompts` is empty.",
            flag_or_none,
        ),
    )
    beginnings: Sequence[str | Path] = field(
        default=(),
        metadata=option(
            "Files of beginnings of user turns, one for each line: every second drawn turn continues one of them.",
            _files,
        ),
    )
    exclude: Sequence[str | Path] = field(
        default=(), metadata=option("Files of texts that must not occur, such as a benchmark's prompts.", _files)
    )

    @property
    def draws(self) -> bool:
        """Whether the target writes user turns."""
        return not self.prompts if self.draw is None else self.draw


if __name__ == "__main__":
    print(TextOptions.table())

"""A mode that is not part of the package."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from speccompile.modes.ngram import NGram


@dataclass(frozen=True)
class OwnMode(NGram):
    name: ClassVar[str] = "own"

"""The default of a parameter for which None is a valid value."""

from __future__ import annotations

import enum


class NotGiven(enum.Enum):
    """The type of :data:`NOT_GIVEN`, only for type hints."""

    NOT_GIVEN = enum.auto()

    def __repr__(self) -> str:
        return self.name


NOT_GIVEN = NotGiven.NOT_GIVEN

"""Options of a call as a frozen dataclass, each with its default, its check and one sentence of documentation.

The sentence is only written here. It is the help of the command line and a row of the table in
``docs/reference/options.md``, and the option's paragraph in the docstring of the call begins with it; tests compare
them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import Field, dataclass, fields
from typing import Any, ClassVar

from speccompile.errors import InvalidOption
from speccompile.utils.not_given import NOT_GIVEN
from speccompile.utils.numbers import is_int, python_numbers

#: Converts ``(where, name, value)`` to the value that is kept. Raises a UserError for one that is not valid.
Read = Callable[[str, str, Any], Any]


def option(sentence: str, read: Read | None = None) -> dict[str, Any]:
    """Metadata of a field of an :class:`Options`.

    Args:
        sentence: a description of the option for users.
        read: checks a value without a model; None leaves the check to the code that uses it.
    """
    return {"sentence": sentence, "read": read}


@dataclass(frozen=True)
class Options:
    """Base of the options of one call. Values are checked when an instance is created.

    Raises:
        UserError: a value is not valid.
    """

    #: The name of the call, for messages.
    where: ClassVar[str]
    #: Parameters of the call that are not options.
    inputs: ClassVar[tuple[str, ...]] = ()

    def __post_init__(self) -> None:
        for item in self._own_fields():
            value = getattr(self, item.name)
            if (read := item.metadata["read"]) and value is not NOT_GIVEN:
                object.__setattr__(self, item.name, read(self.where, item.name, value))

    @classmethod
    def names(cls) -> list[str]:
        """The names of the options, in order."""
        return [item.name for item in cls._own_fields()]

    @classmethod
    def parameters(cls) -> list[str]:
        """Return all names that the call accepts, for messages about unknown ones."""
        return [*cls.inputs, *cls.names()]

    @classmethod
    def sentence(cls, name: str) -> str:
        """Return the description of the option ``name``."""
        return str(cls._field(name).metadata["sentence"])

    @classmethod
    def default_of(cls, name: str) -> Any:
        """Return the default of an option."""
        return cls._field(name).default

    @classmethod
    def least(cls, name: str) -> int | None:
        """Return the least value of an int option; None if it has none."""
        read = cls._field(name).metadata["read"]
        return read.least if isinstance(read, WholeNumber) else None

    @classmethod
    def table(cls) -> str:
        """Return a Markdown table with a line for each option."""
        lines = [f"| `{item.name}` | `{item.default!r}` | {item.metadata['sentence']} |" for item in cls._own_fields()]
        return "\n".join(["| option | default | |", "|---|---|---|", *lines])

    @classmethod
    def _own_fields(cls) -> list[Field[Any]]:
        return [item for item in fields(cls) if "sentence" in item.metadata]

    @classmethod
    def _field(cls, name: str) -> Field[Any]:
        return next(item for item in cls._own_fields() if item.name == name)


# --- checks --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class WholeNumber:
    """Check for an int from ``least`` to ``most``. NumPy's ints are accepted."""

    least: int
    most: int | None = None
    or_none: bool = False

    def __call__(self, where: str, name: str, value: Any) -> int | None:
        """Return ``value`` as an int, or None if that is allowed.

        Raises:
            InvalidOption: ``value`` is not such an int.
        """
        number = python_numbers(value)
        if number is None and self.or_none:
            return None
        whole = is_int(number) and number >= self.least
        if not whole or (self.most is not None and number > self.most):
            bounds = f"of at least {self.least}" if self.most is None else f"in {self.least} .. {self.most}"
            raise InvalidOption(where=where, name=name, value=value, reason=f"it must be an int {bounds}")
        return int(number)


@dataclass(frozen=True)
class OneOf:
    """Check for one of several strings."""

    choices: tuple[str, ...]

    def __call__(self, where: str, name: str, value: Any) -> str:
        """Return ``value``.

        Raises:
            InvalidOption: ``value`` is not one of the choices.
        """
        if not isinstance(value, str) or value not in self.choices:
            raise InvalidOption(where=where, name=name, value=value, reason=f"choose from {', '.join(self.choices)}")
        return value


def flag(where: str, name: str, value: Any) -> bool:
    """Check that ``value`` is True or False.

    Raises:
        InvalidOption: it is neither.
    """
    given = python_numbers(value)
    if not isinstance(given, bool):
        raise InvalidOption(where=where, name=name, value=value, reason="use True or False")
    return given


def flag_or_none(where: str, name: str, value: Any) -> bool | None:
    """Check that ``value`` is True, False or None.

    Raises:
        InvalidOption: it is another value.
    """
    given = python_numbers(value)
    if not (given is None or isinstance(given, bool)):
        raise InvalidOption(where=where, name=name, value=value, reason="use True, False or None")
    return given

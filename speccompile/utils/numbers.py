"""Numbers in arguments: of which type they are, and their conversion from NumPy's types."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from numbers import Integral, Real
from typing import Any, TypeGuard


def python_numbers(value: Any) -> Any:
    """Convert ``value`` to an int, float or bool, if it is such a number. Lists, tuples and mappings are converted
    item by item. A bool stays a bool, so it is refused for a number."""
    # Without NumPy its values cannot occur. The command line need not import it.
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(value, numpy.bool_):
        return bool(value)
    if isinstance(value, bool | int | float | str):
        return float(value) if isinstance(value, float) else value
    if isinstance(value, Integral):
        return int(value)
    if isinstance(value, Real):
        return float(value)
    if type(value) in (list, tuple):
        return type(value)(python_numbers(item) for item in value)
    if isinstance(value, Mapping):
        return {python_numbers(key): python_numbers(item) for key, item in value.items()}
    return value


def is_int(value: object) -> TypeGuard[int]:
    """Whether ``value`` is an int. A bool is not."""
    return isinstance(value, int) and not isinstance(value, bool)


def is_real(value: object) -> TypeGuard[int | float]:
    """Whether ``value`` is an int or a float. A bool is not."""
    return isinstance(value, int | float) and not isinstance(value, bool)

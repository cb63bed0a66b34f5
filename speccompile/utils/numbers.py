"""Numbers as Python's own: what callers compute with NumPy are numbers too."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from numbers import Integral, Real
from typing import Any


def python_numbers(value: Any) -> Any:
    """``value``, or the int, float or bool that it is; the same of what lists, tuples and mappings hold. A bool stays
    one, so that it is refused where a number is wanted."""
    # Without NumPy there are none of its values, and the command line need not load it.
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

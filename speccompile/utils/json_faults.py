"""Reasons why a text is not JSON."""

from __future__ import annotations


def json_fault(error: ValueError) -> str:
    """Return the reason of an error of ``json.loads``. Python's own names a function of ``sys`` for numbers with
    thousands of digits."""
    return "a number has too many digits" if "set_int_max_str_digits" in str(error) else str(error)

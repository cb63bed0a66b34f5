"""Regular expression of JSON objects without a schema, for ``response_format`` ``json_object``."""

from __future__ import annotations

from speccompile.guides.json_regex import CHARACTER, any_of

#: Levels of objects and arrays. An automaton has a copy for each level: each level has about three times the states of
#: the level inside of it. With a fourth one the compilation would exceed the default time limit.
DEPTH = 3
_STRING = f'"{CHARACTER}*"'
_NUMBER = r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?"


def json_object_regex(depth: int = DEPTH) -> str:
    """Expression for objects with any members, in which objects and arrays nest up to ``depth`` levels, the outermost
    included. Spaces are optional only after commas and colons. Numbers have no exponent."""
    value = any_of([_STRING, _NUMBER, "true", "false", "null"])
    for _ in range(depth - 1):
        value = any_of([value, _object(value), rf"\[{_list(value)}\]"])
    return _object(value)


def _object(value: str) -> str:
    return rf"\{{{_list(f'{_STRING}: ?{value}')}\}}"


def _list(item: str) -> str:
    # In this form the automaton has one copy of the item. "item(, item)*" would have two.
    return f"(?:(?:{item}, ?)*{item})?"

"""The regular expression of JSON objects without a schema, for ``response_format`` ``json_object``."""

from __future__ import annotations

from speccompile.guides.json_regex import CHARACTER, any_of

#: Levels of objects and arrays. A finite automaton counts them by copies of itself: each level has about three times
#: the states of the one inside of it, and a fourth one takes longer to compile than the default limit.
DEPTH = 3
_STRING = f'"{CHARACTER}*"'
_NUMBER = r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?"


def json_object_regex(depth: int = DEPTH) -> str:
    """Objects with any members, in which objects and arrays nest up to ``depth`` levels, the outer one included. Spaces
    are optional after commas and colons, and nowhere else; numbers have no exponent."""
    value = any_of([_STRING, _NUMBER, "true", "false", "null"])
    for _ in range(depth - 1):
        value = any_of([value, _object(value), rf"\[{_list(value)}\]"])
    return _object(value)


def _object(value: str) -> str:
    return rf"\{{{_list(f'{_STRING}: ?{value}')}\}}"


def _list(item: str) -> str:
    # Both copies of the item are read together, so that the automaton has one. Of "item(, item)*" it has two.
    return f"(?:(?:{item}, ?)*{item})?"

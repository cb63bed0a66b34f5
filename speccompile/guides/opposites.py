"""Schemas of the values for which one keyword is not valid."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from speccompile.errors import InvalidGuide
from speccompile.utils.numbers import is_real

_TYPES = ("null", "boolean", "object", "array", "number", "string")
#: Bound of the length of all texts of a const or an enum. The pattern of other texts nests as deep as a text is long.
MOST_CHARACTERS = 400
_NUMERIC = frozenset({"integer", "number"})


def opposites(name: str, value: Any) -> list[dict[str, Any]]:
    """Schemas of which one is valid for each value that ``{name: value}`` refuses. No schema describes the numbers with
    a fraction, which ``{"type": "integer"}`` refuses, so these are left out.

    Args:
        name: a keyword whose value contains no schema.

    Raises:
        InvalidGuide: no schema expresses it.
    """
    if name not in _OPPOSITES:
        raise InvalidGuide(what="the schema", reason=f"{name} within not, if or oneOf cannot be followed")
    return _OPPOSITES[name](value)


def _of_type(value: str | Sequence[str]) -> list[dict[str, Any]]:
    types = {value} if isinstance(value, str) else {*value}
    rest = [item for item in _TYPES if item not in types and not (item == "number" and types & _NUMERIC)]
    return [{"type": rest}] if rest else []


def _of_values(values: Sequence[Any]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    if any(isinstance(value, dict | list) for value in values):
        reason = "an array or an object of a const or an enum within not, if or oneOf cannot be followed"
        raise InvalidGuide(what="the schema", reason=reason)
    left = [value for value in (False, True) if not any(value is item for item in values)]
    numbers = sorted({value for value in values if is_real(value)})
    texts = [value for value in values if isinstance(value, str)]
    types = ["object", "array", *([] if None in values else ["null"])]
    types += [] if numbers else ["number"]
    types += [] if texts else ["string"]
    found.append({"type": types})
    if left:
        found.append({"enum": left})
    if numbers:
        found.append({"type": "number", "exclusiveMaximum": numbers[0]})
        found += [
            {"type": "number", "exclusiveMinimum": low, "exclusiveMaximum": high}
            for low, high in itertools.pairwise(numbers)
        ]
        found.append({"type": "number", "exclusiveMinimum": numbers[-1]})
    if texts:
        found.append({"type": "string", "pattern": f"^(?:{other_texts(texts)})$"})
    return found


def other_texts(texts: Sequence[str]) -> str:
    """A pattern, as Rust's ``regex`` reads it, of all texts but ``texts``."""
    if sum(map(len, texts)) > MOST_CHARACTERS:
        raise InvalidGuide(what="the schema", reason="so long texts within not, if or oneOf cannot be followed")
    firsts = dict.fromkeys(text[0] for text in texts if text)
    options = [] if "" in texts else [""]
    options.append(f"[^{''.join(map(_escaped, firsts))}](?s:.)*" if firsts else "(?s:.)+")
    for first in firsts:
        rest = other_texts([text[1:] for text in texts if text.startswith(first)])
        options.append(f"[{_escaped(first)}](?:{rest})")
    return "|".join(options)


def _escaped(character: str) -> str:
    return f"\\x{{{ord(character):x}}}"


def _bound(kind: str, keyword: str, shift: int = 0) -> Callable[[Any], list[dict[str, Any]]]:
    """The opposite of a bound is another bound. ``shift`` is the distance to the next value."""

    def opposite(value: Any) -> list[dict[str, Any]]:
        return [] if shift and value + shift < 0 else [{"type": kind, keyword: value + shift}]

    return opposite


def _required(value: Sequence[str]) -> list[dict[str, Any]]:
    return [{"type": "object", "properties": {name: False}} for name in value]


_OPPOSITES: Mapping[str, Callable[[Any], list[dict[str, Any]]]] = {
    "type": _of_type,
    "const": lambda value: _of_values([value]),
    "enum": _of_values,
    "required": _required,
    "minimum": _bound("number", "exclusiveMaximum"),
    "maximum": _bound("number", "exclusiveMinimum"),
    "exclusiveMinimum": _bound("number", "maximum"),
    "exclusiveMaximum": _bound("number", "minimum"),
    "minLength": _bound("string", "maxLength", -1),
    "maxLength": _bound("string", "minLength", 1),
    "minItems": _bound("array", "maxItems", -1),
    "maxItems": _bound("array", "minItems", 1),
    "minProperties": _bound("object", "maxProperties", -1),
    "maxProperties": _bound("object", "minProperties", 1),
}


_WORDS = frozenset({"title", "description", "$comment", "examples"})


def names_schema(value: Any) -> dict[str, Any] | None:
    """The schema of objects whose names are valid for ``value``, that of ``propertyNames``; None if all names are.

    Raises:
        InvalidGuide: no schema expresses it.
    """
    if value is True or value == {}:
        return None
    if value is False:
        return {"properties": {}, "additionalProperties": False}
    rest = {name: item for name, item in value.items() if name not in _WORDS and (name, item) != ("type", "string")}
    if (names := rest.pop("enum", None)) is None and "const" in rest:
        names = [rest.pop("const")]
    least, most = rest.pop("minLength", 0), rest.pop("maxLength", "")
    pattern = rest.pop("pattern", None)
    if rest or (names is not None) + (pattern is not None) + ((least, most) != (0, "")) > 1:
        raise InvalidGuide(what="the schema", reason=f"propertyNames {json.dumps(value)} cannot be followed")
    if names is not None:
        return {"properties": {name: {} for name in names if isinstance(name, str)}, "additionalProperties": False}
    pattern = f"^(?s:.){{{least},{most}}}$" if pattern is None else pattern
    return {"patternProperties": {pattern: {}}, "additionalProperties": False}

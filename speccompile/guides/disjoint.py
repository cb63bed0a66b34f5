"""Whether two schemas have no value in common: by their types, their values, or the properties that they require."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

#: Types without overlaps. A number is an integer or has a fraction.
TYPES = frozenset({"null", "boolean", "object", "array", "integer", "fraction", "string"})
_DEEPEST = 8

#: The schema to which a reference points.
Resolve = Callable[[str], Any]


def types_of(schema: Any, resolve: Resolve | None = None, depth: int = 0) -> frozenset[str]:
    """The types that the values of ``schema`` can have.

    Args:
        resolve: without it a reference may have values of all types.
    """
    if isinstance(schema, bool):
        return TYPES if schema else frozenset()
    found = TYPES
    if depth > _DEEPEST:
        return found
    if "type" in schema:
        named = [schema["type"]] if isinstance(schema["type"], str) else schema["type"]
        found = frozenset({*named, "integer", "fraction"} - {"number"} if "number" in named else named)
    if (values := _values(schema)) is not None:
        found &= {_type(value) for value in values}
    for item in schema.get("allOf", ()):
        found &= types_of(item, resolve, depth + 1)
    for name in ("anyOf", "oneOf"):
        if name in schema:
            found &= frozenset().union(*(types_of(item, resolve, depth + 1) for item in schema[name]))
    if "$ref" in schema and resolve is not None:
        found &= types_of(resolve(schema["$ref"]), resolve, depth + 1)
    return found


def are_disjoint(first: Any, second: Any, resolve: Resolve, count: Callable[[], None], depth: int = 0) -> bool:
    """Whether it is certain that no value is valid for both.

    Args:
        count: called for each comparison. It may raise an exception to end a long one.
    """
    count()
    common = types_of(first, resolve) & types_of(second, resolve)
    if not common:
        return True
    if depth > _DEEPEST:
        return False
    ones, others = _parts(first, resolve), _parts(second, resolve)
    for parts, whole in ((ones, second), (others, first)):
        for options in (part[name] for part in parts for name in ("anyOf", "oneOf") if name in part):
            if all(are_disjoint(option, whole, resolve, count, depth + 1) for option in options):
                return True
    known = [values for parts in (ones, others) if (values := _known_values(parts)) is not None]
    if len(known) == 2 and not known[0] & known[1]:
        return True
    if common != {"object"}:
        return False
    required = {name for part in (*ones, *others) for name in part.get("required", ())}
    return any(
        are_disjoint(one, other, resolve, count, depth + 1)
        for name in sorted(required)
        for one in _of_property(ones, name)
        for other in _of_property(others, name)
    )


def _parts(schema: Any, resolve: Resolve, depth: int = 0) -> list[Mapping[str, Any]]:
    """Schemas that all hold for the values of ``schema``."""
    if isinstance(schema, bool) or depth > _DEEPEST:
        return []
    found = [schema]
    for item in schema.get("allOf", ()):
        found += _parts(item, resolve, depth + 1)
    return found + _parts(resolve(schema["$ref"]), resolve, depth + 1) if "$ref" in schema else found


def _of_property(parts: list[Mapping[str, Any]], name: str) -> list[Any]:
    found = []
    for part in parts:
        if name in part.get("properties", ()):
            found.append(part["properties"][name])
        elif "patternProperties" not in part and "additionalProperties" in part:
            found.append(part["additionalProperties"])
    return found


def _values(schema: Mapping[str, Any]) -> list[Any] | None:
    return [schema["const"]] if "const" in schema else schema.get("enum")


def _known_values(parts: list[Mapping[str, Any]]) -> set[str] | None:
    """The JSON texts of the values that some part lists."""
    listed = [{_text(value) for value in values} for part in parts if (values := _values(part)) is not None]
    return set.intersection(*listed) if listed else None


def _text(value: Any) -> str:
    return json.dumps(json.loads(json.dumps(value), parse_float=_number), sort_keys=True)


def _number(text: str) -> float:
    value = float(text)
    return int(value) if value.is_integer() else value


def _type(value: Any) -> str:
    if isinstance(value, bool) or value is None:
        return "null" if value is None else "boolean"
    if isinstance(value, int | float):
        return "integer" if value == int(value) else "fraction"
    kinds: dict[type, str] = {str: "string", list: "array", dict: "object"}
    return kinds[type(value)]

"""Keeps a call's arguments to the parameters that its tool names.

JSON Schema allows any further property where ``additionalProperties`` is absent, and libraries that read signatures
leave it absent. A small model then invents arguments, of any number and length, that the function refuses. XGrammar's
strict mode and llama.cpp's ``json-schema-to-grammar`` close objects the same way.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from speccompile.errors import InvalidGuide

# With one of these, a value may need a further property.
_MAY_NEED_MORE = frozenset(
    {
        *("allOf", "oneOf", "not", "if", "patternProperties", "propertyNames", "minProperties", "$dynamicRef"),
        *("dependentRequired", "dependentSchemas", "dependencies", "unevaluatedProperties"),
    }
)
_MAPS = ("properties", "$defs", "definitions")
_LISTS = ("anyOf", "prefixItems")


def close_arguments(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``schema`` with ``additionalProperties: false`` in each object that names properties and does not decide
    about others. Values of the result are values of ``schema``.

    A schema with a keyword under which a value may need other properties is returned as it is.

    Raises:
        InvalidGuide: the schema nests too deeply.
    """
    try:
        return _closed_unless_more_is_needed(schema)
    except RecursionError as error:
        raise InvalidGuide(what="the schema", reason="it nests too deeply") from error


def _closed_unless_more_is_needed(schema: Mapping[str, Any]) -> dict[str, Any]:
    parts = _parts(schema)
    if any(_MAY_NEED_MORE & part.keys() or not _names_what_it_requires(part) for part in parts):
        return dict(schema)
    closed = _closed(schema)
    assert isinstance(closed, dict)
    return closed


def _parts(schema: Any) -> list[Mapping[str, Any]]:
    """``schema`` and the schemas in it."""
    if not isinstance(schema, Mapping):
        return []
    inner = [part for key in _MAPS if isinstance(schema.get(key), Mapping) for part in schema[key].values()]
    inner += [part for key in _LISTS if isinstance(schema.get(key), list) for part in schema[key]]
    inner += [schema.get("items"), schema.get("additionalProperties")]
    return [schema, *(part for other in inner for part in _parts(other))]


def _names_what_it_requires(schema: Mapping[str, Any]) -> bool:
    properties, required = schema.get("properties"), schema.get("required", [])
    if not isinstance(properties, Mapping):
        return True
    return isinstance(required, list) and all(isinstance(name, str) and name in properties for name in required)


def _closed(schema: Any) -> Any:
    if not isinstance(schema, Mapping):
        return schema
    result = dict(schema)
    for key in _MAPS:
        if isinstance(schema.get(key), Mapping):
            result[key] = {name: _closed(part) for name, part in schema[key].items()}
    for key in _LISTS:
        if isinstance(schema.get(key), list):
            result[key] = [_closed(part) for part in schema[key]]
    for key in ("items", "additionalProperties"):
        if key in schema:
            result[key] = _closed(schema[key])
    if isinstance(schema.get("properties"), Mapping) and "$ref" not in schema:
        result.setdefault("additionalProperties", False)
    return result

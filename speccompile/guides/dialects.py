"""JSON schemas of earlier drafts in the keywords of 2020-12."""

from __future__ import annotations

import json
import re
from typing import Any

from speccompile.errors import InvalidGuide

#: Drafts in which keywords beside ``$ref`` have no effect.
_EARLY = re.compile(r"https?://json-schema\.org/draft-0[3-7]/")
_CURRENT = "https://json-schema.org/draft/2020-12/schema"
#: Keywords whose value maps names to schemas, is a list of schemas, or is a schema.
NAMED = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas", "dependencies"})
LISTED = frozenset({"allOf", "anyOf", "oneOf", "prefixItems"})
SINGLE = frozenset(
    {
        *("items", "additionalItems", "unevaluatedItems", "contains", "additionalProperties", "propertyNames"),
        *("unevaluatedProperties", "not", "if", "then", "else"),
    }
)
#: Bounds of sizes, which may be written as 2.0.
_SIZES = frozenset(f"{end}{what}" for end in ("min", "max") for what in ("Items", "Length", "Properties", "Contains"))
_DYNAMIC = {"$dynamicRef": "$ref", "$dynamicAnchor": "$anchor"}


def current_schema(schema: dict[str, Any]) -> dict[str, Any]:
    """``schema`` in the keywords of 2020-12. ``$dynamicRef`` becomes ``$ref``, which means the same in a document that
    is one resource.

    Raises:
        InvalidGuide: ``schema`` has ``$dynamicRef`` and is several resources.
    """
    text = json.dumps(schema)
    if '"$dynamicRef"' in text and text.count('"$id"') > ("$id" in schema):
        reason = "$dynamicRef cannot be followed in a document with several $id"
        raise InvalidGuide(what="the schema", reason=reason)
    early = bool(_EARLY.match(str(schema.get("$schema"))))
    found = _current(schema, early=early)
    return found | {"$schema": _CURRENT} if early else found


def _current(schema: Any, *, early: bool) -> Any:
    if not isinstance(schema, dict):
        return schema
    if early and "$ref" in schema:
        schema = {name: value for name, value in schema.items() if name in ("$ref", "$schema", "definitions", "$defs")}
    found = {_DYNAMIC.get(name, name): _current_value(name, value, early=early) for name, value in schema.items()}
    for bound, exclusive in (("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")):
        if isinstance(found.get(exclusive), bool) and found.pop(exclusive) and bound in found:
            found[exclusive] = found.pop(bound)
    if isinstance(found.get("items"), list):
        found["prefixItems"] = found.pop("items")
        found |= {"items": found.pop("additionalItems")} if "additionalItems" in found else {}
    dependencies = found.get("dependencies")
    if isinstance(dependencies, dict) and all(isinstance(value, list | dict | bool) for value in dependencies.values()):
        del found["dependencies"]
        needed = {name: value for name, value in dependencies.items() if isinstance(value, list)}
        schemas = {name: value for name, value in dependencies.items() if not isinstance(value, list)}
        found |= {"dependentRequired": needed} if needed else {}
        found |= {"dependentSchemas": schemas} if schemas else {}
    return found


def _current_value(name: str, value: Any, *, early: bool) -> Any:
    if name in NAMED and isinstance(value, dict):
        return {key: item if isinstance(item, list) else _current(item, early=early) for key, item in value.items()}
    if name in LISTED | {"items"} and isinstance(value, list):
        return [_current(item, early=early) for item in value]
    if name in _SIZES and isinstance(value, float) and value.is_integer():
        return int(value)
    return _current(value, early=early) if name in SINGLE else value

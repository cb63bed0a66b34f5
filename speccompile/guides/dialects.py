"""JSON schemas of earlier drafts in the keywords of 2020-12."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from speccompile.errors import InvalidGuide

CURRENT = "https://json-schema.org/draft/2020-12/schema"
_DRAFT = re.compile(r"https?://json-schema\.org/(?:draft/(20\d\d)-\d\d|draft-0(\d))/")
#: Keywords by the draft that added them. In an earlier one they are annotations.
_ADDED = {
    6: ("const", "contains", "propertyNames"),
    7: ("if", "then", "else"),
    2019: (
        *("dependentRequired", "dependentSchemas", "unevaluatedProperties", "unevaluatedItems"),
        *("minContains", "maxContains", "$anchor"),
    ),
    2020: ("prefixItems", "$dynamicRef", "$dynamicAnchor"),
}
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
        InvalidGuide: ``schema`` is not valid for its draft, is of draft 3, or is several resources.
    """
    # Of an extra, like llguidance.
    import jsonschema

    try:
        jsonschema.validators.validator_for(schema, jsonschema.Draft202012Validator).check_schema(
            schema,
            # Patterns are Rust's by now.
            format_checker=jsonschema.FormatChecker(()),
        )
    except jsonschema.SchemaError as error:
        place = "/".join(["#", *map(str, error.absolute_path)])
        raise InvalidGuide(what="the schema", reason=f"{error.message} at {place}") from error
    named = _DRAFT.match(str(schema.get("$schema", CURRENT)))
    draft = int(named[1] or named[2]) if named else 2020
    if draft < 4:
        raise InvalidGuide(what="the schema", reason=f"draft {draft} cannot be followed")
    if any("$id" in item or ("id" in item and draft == 4) for item in subschemas(schema) if item is not schema):
        reason = "keywords that are rewritten cannot be followed in a document with several $id"
        raise InvalidGuide(what="the schema", reason=reason)
    found: dict[str, Any] = _current(schema, draft)
    return found | {"$schema": CURRENT} if named and "$schema" in found else found


def subschemas(schema: Any) -> Iterator[dict[str, Any]]:
    """``schema`` and all objects within it that are schemas."""
    waiting = [schema]
    while waiting:
        item = waiting.pop()
        if not isinstance(item, dict):
            continue
        yield item
        for name, value in item.items():
            if name in NAMED and isinstance(value, dict):
                waiting += value.values()
            elif isinstance(value, list) and name in LISTED | {"items"}:
                waiting += value
            elif name in SINGLE:
                waiting.append(value)


def _current(schema: Any, draft: int) -> Any:
    if not isinstance(schema, dict):
        return schema
    if draft <= 7 and "$ref" in schema:
        # Keywords beside a reference have no effect.
        schema = {name: value for name, value in schema.items() if name in ("$ref", "$schema", "definitions", "$defs")}
    added_later = {name for added, names in _ADDED.items() if added > draft for name in names}
    found: dict[str, Any] = {}
    for name, value in schema.items():
        if name in added_later or (name == "dependencies" and draft > 7):
            continue
        if (plain := _DYNAMIC.get(name)) in schema:
            reason = f"{name} beside {plain} cannot be followed"
            raise InvalidGuide(what="the schema", reason=reason)
        found[plain or name] = _current_value(name, value, draft)
    for bound, exclusive in (("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")):
        if isinstance(found.get(exclusive), bool) and found.pop(exclusive) and bound in found:
            found[exclusive] = found.pop(bound)
    others = found.pop("additionalItems", None) if draft < 2020 else None
    if isinstance(found.get("items"), list):
        found["prefixItems"] = found.pop("items")
        found |= {} if others is None else {"items": others}
    dependencies = found.pop("dependencies", {})
    needed = {name: value for name, value in dependencies.items() if isinstance(value, list)}
    schemas = {name: value for name, value in dependencies.items() if not isinstance(value, list)}
    found |= {"dependentRequired": needed} if needed else {}
    found |= {"dependentSchemas": schemas} if schemas else {}
    return found


def _current_value(name: str, value: Any, draft: int) -> Any:
    if name in NAMED and isinstance(value, dict):
        return {key: item if isinstance(item, list) else _current(item, draft) for key, item in value.items()}
    if name in LISTED | {"items"} and isinstance(value, list):
        return [_current(item, draft) for item in value]
    if name in _SIZES and isinstance(value, float) and value.is_integer():
        return int(value)
    return _current(value, draft) if name in SINGLE else value

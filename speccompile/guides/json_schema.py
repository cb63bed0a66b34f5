"""Guides from JSON schemas, by way of outlines-core, which makes a regular expression of them.

outlines-core passes over keywords that it does not know. Here they are refused, so that a text which follows the guide
is valid by the schema, always.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from re import _constants as sre  # type: ignore[attr-defined]
from re import _parser  # type: ignore[attr-defined]
from typing import Any

from transformers import PreTrainedTokenizerBase

from speccompile.errors import InvalidGuide
from speccompile.guides.guide import Guide
from speccompile.guides.regex import outlines_core, regex_guide

ANNOTATIONS = frozenset(
    {"title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly"}
    | {"$schema", "$id", "$comment", "$defs", "definitions"}
)
FORMATS = ("date", "time", "date-time", "uuid", "uri", "email")
KEYWORDS: Mapping[str, frozenset[str]] = {
    "null": frozenset(),
    "boolean": frozenset(),
    "integer": frozenset({"minDigits", "maxDigits"}),
    "number": frozenset(f"{end}Digits{part}" for end in ("min", "max") for part in ("Integer", "Fraction", "Exponent")),
    "string": frozenset({"minLength", "maxLength", "pattern", "format"}),
    "array": frozenset({"items", "prefixItems", "minItems", "maxItems"}),
    "object": frozenset({"properties", "required", "additionalProperties", "minProperties", "maxProperties"}),
}


def json_schema_guide(schema: Mapping[str, Any] | str | type, tokenizer: PreTrainedTokenizerBase) -> Guide:
    """Texts that are JSON and valid by ``schema``, with at most one space where JSON allows any.

    Args:
        schema: as a dict, as JSON text, or a class with ``model_json_schema`` (pydantic's).
        tokenizer: of the model, a fast one.

    Raises:
        InvalidGuide: it is no schema, uses a keyword that a finite automaton cannot check, or nothing matches it.
        InvalidInput: the tokenizer does not tell the bytes of its tokens.
    """
    schema = _as_dict(schema)
    text = json.dumps(schema)
    _check(schema, "the schema", lambda reason: InvalidGuide(what=text, reason=reason))
    try:
        pattern = outlines_core().json_schema.build_regex_from_schema(text)
    except ValueError as error:
        raise InvalidGuide(what=text, reason=str(error).strip()) from error
    return regex_guide(pattern, tokenizer)


def _as_dict(schema: Any) -> dict[str, Any]:
    made = getattr(schema, "model_json_schema", None)
    value = made() if callable(made) else schema
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except json.JSONDecodeError as error:
            raise InvalidGuide(what=repr(schema), reason=f"it is no JSON: {error}") from error
    if not isinstance(value, Mapping):
        raise InvalidGuide(what=repr(schema), reason="a JSON schema is an object")
    return dict(value)


def _check(schema: Any, where: str, error: Callable[[str], InvalidGuide]) -> None:
    """Raises what ``error`` makes of the reason why ``schema`` cannot be followed exactly."""
    if not isinstance(schema, Mapping) or not (given := schema.keys() - ANNOTATIONS):
        raise error(f"{where} allows anything; say what type it has")
    for name in ("$defs", "definitions"):
        for key, value in schema.get(name, {}).items():
            _check(value, f"{where}, {name}.{key}", error)
    if given == {"$ref"}:
        return
    if given == {"anyOf"} or (given == {"allOf"} and len(schema["allOf"]) == 1):
        (name,) = given
        for index, value in enumerate(schema[name]):
            _check(value, f"{where}, {name}[{index}]", error)
        return
    if given in ({"const"}, {"enum"}, {"const", "type"}, {"enum", "type"}):
        return
    kind = schema.get("type")
    if isinstance(kind, list) and given == {"type"}:
        for name in kind:
            _check({"type": name}, where, error)
        return
    if not isinstance(kind, str) or kind not in KEYWORDS:
        names = ", ".join(sorted(given - {"type"})) or f"type {kind!r}"
        advice = "; write anyOf, if no text fits two of them" if "oneOf" in given else ""
        raise error(f"{where}: {names} cannot be followed{advice}")
    if unknown := given - KEYWORDS[kind] - {"type"}:
        known = ", ".join(sorted(KEYWORDS[kind])) or "nothing"
        raise error(f"{where}: {', '.join(sorted(unknown))} cannot be followed; beside type {kind!r} it knows {known}")
    {"string": _check_string, "array": _check_array, "object": _check_object}.get(kind, _nothing)(schema, where, error)


def _nothing(schema: Mapping[str, Any], where: str, error: Callable[[str], InvalidGuide]) -> None:
    pass


def _check_string(schema: Mapping[str, Any], where: str, error: Callable[[str], InvalidGuide]) -> None:
    kinds = [name for name in ("pattern", "format") if name in schema]
    if {"minLength", "maxLength"} & schema.keys():
        kinds.append("minLength or maxLength")
    if len(kinds) > 1:
        raise error(f"{where}: {' and '.join(kinds)} cannot be followed together")
    if "format" in schema and schema["format"] not in FORMATS:
        raise error(f"{where}: format {schema['format']!r} is not known; these are: {', '.join(FORMATS)}")
    if "pattern" in schema:
        try:
            parsed = _parser.parse(schema["pattern"])
        except (re.error, TypeError) as problem:
            raise error(f"{where}: its pattern is not valid: {problem}") from problem
        if _may_leave_the_string(parsed):
            raise error(
                f"{where}: its pattern may match what JSON has to escape (a quote, a backslash, a control character): "
                "write out the characters that may come, such as [a-z ]"
            )


def _may_leave_the_string(parsed: Any) -> bool:
    """Whether a parsed pattern matches any character that stands for itself outside of a JSON string only."""
    for op, value in parsed:
        if op in (sre.ANY, sre.NOT_LITERAL) or (op is sre.LITERAL and _needs_escape(value)):
            return True
        if op is sre.IN and any(
            kind is sre.NEGATE
            or (kind is sre.LITERAL and _needs_escape(item))
            or (kind is sre.RANGE and any(_needs_escape(code) for code in range(item[0], min(item[1], 0x9F) + 1)))
            or (kind is sre.CATEGORY and item not in (sre.CATEGORY_DIGIT, sre.CATEGORY_WORD))
            for kind, item in value
        ):
            return True
        parts = value if isinstance(value, tuple | list) else (value,)
        for part in parts:
            inner = part if isinstance(part, list) else [part]
            if any(isinstance(item, _parser.SubPattern) and _may_leave_the_string(item) for item in inner):
                return True
    return False


def _needs_escape(code: int) -> bool:
    return code in (ord('"'), ord("\\")) or code < 0x20 or 0x7F <= code <= 0x9F


def _check_array(schema: Mapping[str, Any], where: str, error: Callable[[str], InvalidGuide]) -> None:
    if ("items" in schema) == ("prefixItems" in schema):
        raise error(f"{where}: say either items or prefixItems")
    if "prefixItems" in schema and {"minItems", "maxItems"} & schema.keys():
        raise error(f"{where}: prefixItems has as many items as it names; minItems and maxItems cannot be followed")
    items = {"items": schema["items"]} if "items" in schema else dict(enumerate(schema["prefixItems"]))
    for name, value in items.items():
        _check(value, f"{where}, {name}", error)


def _check_object(schema: Mapping[str, Any], where: str, error: Callable[[str], InvalidGuide]) -> None:
    others = schema.get("additionalProperties")
    if "properties" in schema:
        if {"minProperties", "maxProperties"} & schema.keys() or others not in (None, False, True):
            raise error(f"{where}: beside properties, numbers or schemas of others cannot be followed")
        for name, value in schema["properties"].items():
            _check(value, f"{where}, {name}", error)
    elif not isinstance(others, Mapping):
        raise error(f"{where}: say its properties, or the schema of all of them (additionalProperties)")
    else:
        _check(others, f"{where}, additionalProperties", error)
    if unknown := set(schema.get("required", ())) - schema.get("properties", {}).keys():
        raise error(f"{where}: {', '.join(sorted(unknown))} is required and not among its properties")

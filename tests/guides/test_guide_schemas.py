"""Guides of JSON schemas: whatever follows one is valid, and what cannot be followed is refused."""

from __future__ import annotations

import datetime
import json
import random
import re
from typing import Any

import pytest

from speccompile.errors import InvalidGuide
from speccompile.guides import Guide, json_schema_guide
from speccompile.guides.token_bytes import token_bytes
from support.errors import raises
from support.guide_tokenizers import byte_level, common, walk

Schema = dict[str, Any]


def is_valid(value: Any, schema: Schema, root: Schema) -> bool:
    """JSON Schema, as far as these tests use it."""
    if "$ref" in schema:
        _, place, name = schema["$ref"].split("/")
        return is_valid(value, root[place][name], root)
    for name, some in (("anyOf", any), ("allOf", all)):
        if name in schema:
            return some(is_valid(value, part, root) for part in schema[name])
    if "enum" in schema or "const" in schema:
        wanted = schema.get("enum", [schema.get("const")])
        return any(type(value) is type(item) and value == item for item in wanted)
    kinds = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
    return any(is_of_type(value, kind, schema, root) for kind in kinds)


def is_of_type(value: Any, kind: str, schema: Schema, root: Schema) -> bool:
    if kind == "string":
        if not isinstance(value, str) or not schema.get("minLength", 0) <= len(value) <= schema.get("maxLength", 10**6):
            return False
        return re.search(schema.get("pattern", ""), value) is not None
    if kind == "array":
        if not isinstance(value, list) or not schema.get("minItems", 0) <= len(value) <= schema.get("maxItems", 10**6):
            return False
        kinds = schema.get("prefixItems") or [schema["items"]] * len(value)
        return len(kinds) == len(value) and all(is_valid(v, k, root) for v, k in zip(value, kinds, strict=True))
    if kind == "object":
        known = schema.get("properties", {})
        others = schema.get("additionalProperties")
        return (
            isinstance(value, dict)
            and set(schema.get("required", ())) <= value.keys()
            and all(is_valid(v, known.get(k, others), root) for k, v in value.items())
        )
    if kind == "integer":
        digits = len(str(abs(value))) if type(value) is int else 0
        return schema.get("minDigits", 1) <= digits <= schema.get("maxDigits", 10**6)
    kinds: dict[str, tuple[type, ...]] = {"number": (int, float), "boolean": (bool,), "null": (type(None),)}
    return type(value) in kinds[kind]


NULL: Schema = {"type": "null"}
ACCEPTED: list[Schema] = [
    NULL,
    {"type": "boolean", "title": "x", "default": True},
    {"type": "integer", "maxDigits": 3},
    {"type": "integer", "minDigits": 2, "maxDigits": 2},
    {"type": "number", "maxDigitsInteger": 2, "maxDigitsFraction": 2, "maxDigitsExponent": 2},
    {"type": "number", "minDigitsFraction": 2},
    {"type": ["integer", "number"]},
    {"type": ["string", "null"]},
    {"type": "string", "minLength": 1, "maxLength": 3},
    {"type": "string", "maxLength": 0},
    {"type": "string", "pattern": "a|b"},
    {"type": "string", "pattern": "^a|bc$"},
    {"type": "string", "pattern": "(?i)[a-c]{1,2}"},
    {"enum": [1, 10, "a", "ab", None, True, 1.5, [1, {"a": []}], {}]},
    {"enum": ["a", "b"], "type": "string"},
    {"const": 'a"b\\c\n é [x].{2}-&~#'},
    {"const": {'a"': [1, "b"], "": {}}},
    {"type": "array", "items": {"enum": [1, 10]}, "maxItems": 2},
    {"type": "array", "items": NULL, "minItems": 2, "maxItems": 2},
    {"type": "array", "items": NULL, "minItems": 1},
    {"type": "array", "items": NULL, "maxItems": 0},
    {"type": "array", "prefixItems": [NULL, {"type": "boolean"}]},
    {"type": "object", "properties": {}},
    {"type": "object", "properties": {"a": NULL, "b": {"type": "boolean"}}},
    {"type": "object", "properties": {"a": NULL, "b": NULL, "c": NULL}, "required": ["b"]},
    {"type": "object", "properties": {"a": NULL, "b": NULL, "c": NULL}, "required": ["a", "c"]},
    {"type": "object", "properties": {'a"\\x.é\n': NULL}, "required": ['a"\\x.é\n'], "additionalProperties": False},
    {"type": "object", "additionalProperties": {"type": "integer", "maxDigits": 1}},
    {"anyOf": [{"enum": [1]}, {"enum": [12]}, NULL]},
    {"allOf": [{"type": "boolean"}], "description": "one"},
    {
        "$defs": {"A": {"type": "array", "items": {"$ref": "#/$defs/B"}, "maxItems": 2}, "B": NULL},
        "type": "object",
        "properties": {"x": {"$ref": "#/$defs/A", "description": "y"}, "y": {"$ref": "#/$defs/A"}},
    },
    {"definitions": {"A": {"enum": ["a"]}}, "$ref": "#/definitions/A"},
]


def texts(guide: Guide, count: int, seed: int = 0) -> list[str]:
    pieces = {token: piece for piece, ids in token_bytes(common()).items() for token in ids}
    rng = random.Random(seed)
    return [b"".join(pieces[token] for token in walk(guide, rng)).decode() for _ in range(count)]


@pytest.mark.parametrize("schema", ACCEPTED, ids=lambda schema: json.dumps(schema)[:50])
def test_texts_that_follow_a_guide_are_valid(schema: Schema) -> None:
    for text in texts(json_schema_guide(schema, common()), 60):
        assert is_valid(json.loads(text), schema, schema), text


@pytest.mark.parametrize("schema", ACCEPTED[13:], ids=lambda schema: json.dumps(schema)[:50])
def test_every_value_can_be_written(schema: Schema) -> None:
    """Compactly, and with the spaces that json.dumps puts."""
    guide, by_bytes = json_schema_guide(schema, common()), token_bytes(common())
    values = schema.get("enum", [schema["const"]] if "const" in schema else [])
    if "properties" in schema and "$defs" not in schema:
        must = {name: None for name in schema.get("required", ())}
        values = [
            must,
            *([{"a": None, "b": True}, {"b": False}, {"a": None}] if list(schema["properties"]) == ["a", "b"] else []),
        ]
    if "anyOf" in schema:
        values = [1, 12, None]
    for value in values:
        for separators in ((",", ":"), (", ", ": ")):
            text = json.dumps(value, ensure_ascii=False, separators=separators)
            assert guide.matches([by_bytes[bytes([byte])][0] for byte in text.encode()]), text


@pytest.mark.parametrize("name", ["date", "time", "date-time", "uuid", "uri", "email"])
def test_strings_of_a_format_are_of_that_format(name: str) -> None:
    for text in texts(json_schema_guide({"type": "string", "format": name}, common()), 60):
        value = json.loads(text)
        assert value.isascii() and not set(value) & set(' "\\<>'), value
        if name in ("date", "time", "date-time"):
            getattr(datetime, {"date-time": "datetime"}.get(name, name)).fromisoformat(value)


REFUSED: list[tuple[Any, str]] = [
    (5, "a JSON schema must be an object"),
    ("{", "it is not JSON"),
    ("[]", "a JSON schema must be an object"),
    ({}, "the schema allows anything; give its type"),
    ({"title": "x"}, "the schema allows anything"),
    ({"type": "array", "items": True}, "the schema, items allows anything"),
    ({"type": "text"}, "type 'text' cannot be followed"),
    ({"type": []}, "type must be a list that is not empty"),
    ({"type": ["object", "null"]}, "give its properties"),
    ({"anyOf": []}, "anyOf must be a list that is not empty"),
    ({"enum": []}, "enum must be a list that is not empty"),
    ({"enum": "ab"}, "enum must be a list"),
    ({"enum": ["a"], "const": "b"}, "const, enum cannot be followed"),
    ({"const": 5, "type": "string"}, "5 is not of type 'string'"),
    ({"enum": [True], "type": "integer"}, "True is not of type 'integer'"),
    ({"const": float("nan")}, "a value is not JSON"),
    ({"oneOf": [NULL]}, "oneOf cannot be followed; write anyOf"),
    ({"allOf": [NULL, NULL]}, "allOf of more than one schema cannot be followed"),
    ({"not": NULL}, "not cannot be followed"),
    ({"if": NULL, "then": NULL}, "if, then cannot be followed"),
    ({"type": "null", "nullable": True}, "beside type 'null' it knows nothing"),
    ({"anyOf": [NULL], "type": "null"}, "anyOf cannot be followed"),
    ({"$ref": "#/$defs/A", "type": "null"}, "$ref cannot be followed"),
    ({"$ref": "#/$defs/A"}, "$ref '#/$defs/A' leads nowhere"),
    ({"$ref": "#"}, "it must be #/$defs/NAME"),
    ({"$ref": 5}, "leads nowhere"),
    ({"$defs": {"A": {"type": "array", "items": {"$ref": "#/$defs/A"}}}, "$ref": "#/$defs/A"}, "contains itself"),
    *[({"type": "integer", name: 5}, f"{name} cannot be followed") for name in ("minimum", "maximum", "multipleOf")],
    *[({"type": "number", name: 5}, f"{name} cannot be followed") for name in ("exclusiveMinimum", "exclusiveMaximum")],
    ({"type": "integer", "maxDigits": 0}, "maxDigits must be an int of at least 1"),
    ({"type": "integer", "minDigits": 3, "maxDigits": 2}, "maxDigits is smaller than minDigits"),
    ({"type": "number", "maxDigitsFraction": 0}, "maxDigitsFraction must be an int of at least 1"),
    ({"type": "string", "maxLength": -1}, "maxLength must be an int of at least 0"),
    ({"type": "string", "maxLength": "x"}, "maxLength must be an int of at least 0"),
    ({"type": "string", "minLength": 2, "maxLength": 1}, "maxLength is smaller than minLength"),
    (
        {"type": "string", "pattern": "a", "maxLength": 1},
        "pattern and minLength or maxLength cannot be followed together",
    ),
    ({"type": "string", "pattern": "a", "format": "date"}, "pattern and format cannot be followed together"),
    ({"type": "string", "format": "ipv4"}, "format 'ipv4' is not known; these are: date, time"),
    ({"type": "string", "contentEncoding": "base64"}, "contentEncoding cannot be followed"),
    ({"type": "string", "pattern": 5}, "its pattern must be a str"),
    ({"type": "string", "pattern": "["}, "syntax of Rust's regex"),
    *[
        ({"type": "string", "pattern": pattern}, "its pattern may match a character that JSON must escape")
        for pattern in (".", '"', "a\\\\", "[^a]", "[[^a]]", "[[:^alpha:]]", r"\s", "\n", r"\x00", "(?s:.)", "a|(b|\t)")
    ],
    ({"type": "array"}, "give either items or prefixItems"),
    ({"type": "array", "items": NULL, "prefixItems": [NULL]}, "give either items or prefixItems"),
    ({"type": "array", "prefixItems": [NULL], "maxItems": 1}, "minItems and maxItems cannot be followed"),
    ({"type": "array", "items": NULL, "minItems": 2, "maxItems": 1}, "maxItems is smaller than minItems"),
    ({"type": "array", "items": NULL, "uniqueItems": True}, "uniqueItems cannot be followed"),
    ({"type": "array", "items": NULL, "contains": NULL}, "contains cannot be followed"),
    ({"type": "object"}, "give its properties"),
    ({"type": "object", "additionalProperties": True}, "give its properties"),
    (
        {"type": "object", "properties": {"a": NULL}, "additionalProperties": NULL},
        "schemas of others cannot be followed",
    ),
    ({"type": "object", "properties": [1]}, "properties must be an object"),
    ({"type": "object", "properties": {"a": NULL}, "required": "a"}, "required a list"),
    ({"type": "object", "properties": {"a": NULL}, "required": ["b"]}, "b is required and not among its properties"),
    ({"type": "object", "properties": {"a": {"minimum": 1}}}, "the schema, a: minimum cannot be followed"),
    *[({"$ref": "#/$defs/x", "$defs": defined}, "leads nowhere") for defined in ([], None, {"y": NULL})],
    *[
        ({"type": "object", "properties": {"a": NULL}, "required": required}, "required must be a list of names")
        for required in ([["a"]], [1])
    ],
    *[({"type": "string", "format": form}, "is not known; these are") for form in (["date"], {}, 1)],
    ({"type": "null", 1: 2}, "the schema: 1 cannot be followed"),
    ({"type": "null", "title": {1}}, "it is not JSON"),
    *[
        ({"type": "object", "properties": {"a": NULL}, name: 1}, f"{name} cannot be followed")
        for name in ("patternProperties", "propertyNames", "minProperties", "maxProperties", "dependentRequired")
    ],
]


@pytest.mark.parametrize(("schema", "reason"), REFUSED, ids=lambda value: str(value)[:50])
def test_what_cannot_be_followed_is_refused(schema: Any, reason: str) -> None:
    with raises(InvalidGuide, reason=re.compile(re.escape(reason))):
        json_schema_guide(schema, common())


def test_a_schema_as_text_and_as_a_class() -> None:
    schema: Schema = {"type": "object", "properties": {"a": NULL}, "required": ["a"]}

    class Model:
        @staticmethod
        def model_json_schema() -> Schema:
            return schema

    guides = [json_schema_guide(given, common()) for given in (schema, json.dumps(schema), Model)]
    assert len({tuple(guide.moves.flatten().tolist()) for guide in guides}) == 1


def test_a_pydantic_class() -> None:
    pydantic = pytest.importorskip("pydantic")
    inner = pydantic.create_model("Inner", ok=(bool, ...), tags=(list[str], ...))
    outer = pydantic.create_model("Outer", name=(str | None, None), inner=(inner, ...), others=(dict[str, int], ...))
    for text in texts(json_schema_guide(outer, common()), 20):
        outer.model_validate_json(text)


def test_strings_go_on_in_any_language() -> None:
    guide, by_bytes = json_schema_guide({"type": "string"}, byte_level()), token_bytes(byte_level())
    assert guide.matches([by_bytes[bytes([byte])][0] for byte in '"日本語 ½ \\n"'.encode()])
    assert not guide.matches([by_bytes[bytes([byte])][0] for byte in b'"\xc3"'])


@pytest.mark.parametrize(
    ("pattern", "right", "wrong"),
    [
        (r"\d{2}", ["12"], ["٣٣", "1a"]),
        (r"\w", ["a", "_", "0"], ["é", "-"]),
        (r"[\d.]+", ["1.5"], ["٣"]),
        (r"[^\W\d]", ["a", "_"], ["1", "é", "-"]),
        (r"[a&&b]", ["a", "&", "b"], ["ab"]),
        (r"[a~~b]", ["a", "~", "b"], ["ab"]),
        (r"\.", ["."], ["d"]),
    ],
)
def test_patterns_mean_what_schemas_mean(pattern: str, right: list[str], wrong: list[str]) -> None:
    """ECMA-262's expressions, in which classes are ASCII."""
    guide, by_bytes = json_schema_guide({"type": "string", "pattern": pattern}, byte_level()), token_bytes(byte_level())
    for text in right + wrong:
        ids = [by_bytes[bytes([byte])][0] for byte in f'"{text}"'.encode()]
        assert guide.matches(ids) == (text in right), text


def test_a_long_text_takes_no_longer_than_its_tables() -> None:
    """Each quote in it may not be taken for another beginning: that doubles the automaton for every character."""
    guide, by_bytes = json_schema_guide({"type": "string", "maxLength": 200}, byte_level()), token_bytes(byte_level())
    assert len(guide.final) < 20 * 200
    for length in (0, 200, 201):
        ids = [by_bytes[bytes([byte])][0] for byte in json.dumps('"' * length).encode()]
        assert guide.matches(ids) == (length <= 200)

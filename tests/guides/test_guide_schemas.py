"""Guides of JSON schemas, against the library jsonschema: every text is valid, and the rest is refused."""

from __future__ import annotations

import datetime
import json
import random
import re
from typing import Any

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st

from speccompile.errors import InvalidGuide
from speccompile.guides import Guide, json_schema_guide
from support.errors import raises
from support.guide_tokenizers import byte_level, common, draw_json, token_ids

Schema = dict[str, Any]

NULL: Schema = {"type": "null"}
#: Each with values in the order of its properties, valid and not.
SCHEMAS: list[tuple[Schema, list[Any]]] = [
    ({}, [1, "a", None, [], {"a": [1.5]}]),
    ({"title": "x", "default": 5}, [None, {}]),
    (NULL, [None, False, {}]),
    ({"type": "boolean", "title": "x", "default": True}, [True, False, 0, 1]),
    ({"type": "integer", "minimum": -9, "maximum": 120}, [-10, -9, 0, 120, 121, 1000, 1.5]),
    ({"type": "integer", "exclusiveMinimum": 0, "multipleOf": 7}, [0, 7, 8, 70]),
    ({"type": "number", "minimum": -0.5, "exclusiveMaximum": 2.25}, [-0.5, -0.51, 0, 2.24, 2.25]),
    ({"type": ["integer", "number"]}, [1, 1.5, "1"]),
    ({"type": ["string", "null"]}, ["a", None, 0]),
    ({"type": "string", "minLength": 1, "maxLength": 3}, ["", "a", "abc", 'é"\n', "\U0001f600" * 3, "abcd"]),
    ({"type": "string", "pattern": "a|b"}, ["a", "xbx", "c", ""]),
    ({"type": "string", "pattern": "^a|bc$"}, ["ax", "xbc", "bcx"]),
    ({"type": "string", "pattern": "^[a-c]{1,2}$", "maxLength": 1}, ["a", "ab", "d"]),
    ({"enum": [1, 10, "a", "ab", None, True, 1.5, [1, {"a": []}], {}]}, [1, 10, "ab", 1.5, [1, {"a": []}], {}, 2, [1]]),
    ({"enum": ["a", 1], "type": "string"}, ["a", 1]),
    ({"const": 'a"b\\c\n é [x].{2}-&~#'}, ['a"b\\c\n é [x].{2}-&~#', "a"]),
    ({"const": {'a"': [1, "b"], "": {}}}, [{'a"': [1, "b"], "": {}}, {}]),
    ({"type": "array", "items": {"enum": [1, 10]}, "maxItems": 2}, [[], [1], [1, 10], [1, 1, 1], [2]]),
    ({"type": "array", "items": NULL, "minItems": 2, "maxItems": 2}, [[None], [None, None]]),
    ({"type": "array", "prefixItems": [NULL, {"type": "boolean"}], "items": {"enum": ["a"]}}, [[], [None, True, "a"]]),
    ({"type": "array", "prefixItems": [NULL], "items": False}, [[None], [None, None]]),
    ({"type": "object", "properties": {"a": NULL, "b": {"type": "boolean"}}}, [{}, {"b": True}, {"a": None, "c": 5}]),
    ({"type": "object", "properties": {"a": NULL, "b": NULL}, "required": ["b"]}, [{}, {"b": None}, {"a": None}]),
    ({"type": "object", "properties": {"a": NULL}, "additionalProperties": False}, [{}, {"a": None}, {"c": 5}]),
    ({"type": "object", "properties": {"a": NULL}, "additionalProperties": NULL}, [{"a": None, "c": None}, {"c": 5}]),
    ({"type": "object", "properties": {'a"\\x.é\n': NULL}, "required": ['a"\\x.é\n']}, [{'a"\\x.é\n': None}, {}]),
    ({"type": "object", "patternProperties": {"^a": NULL, "^b": {"type": "boolean"}}}, [{"ab": None}, {"b": None}]),
    ({"type": "object", "maxProperties": 1, "minProperties": 1}, [{}, {"a": 1}, {"a": 1, "b": 1}]),
    ({"anyOf": [{"enum": [1]}, {"enum": [12]}, NULL]}, [1, 12, None, 2]),
    ({"allOf": [{"type": "integer", "minimum": 3}, {"maximum": 5}], "description": "one"}, [2, 3, 5, 6]),
    ({"oneOf": [NULL, {"type": "integer"}]}, [None, 1, "a"]),
    ({"definitions": {"A": {"enum": ["a"]}}, "$ref": "#/definitions/A"}, ["a", "b"]),
    ({"$ref": "#/$defs/A", "$defs": {"A": {"type": "integer"}}, "maximum": 5}, [5, 6]),
    (
        {
            "$defs": {"tree": {"type": "array", "items": {"$ref": "#/$defs/tree"}, "maxItems": 2}},
            "type": "object",
            "properties": {"x": {"$ref": "#/$defs/tree", "description": "y"}, "y": {"$ref": "#/$defs/tree"}},
        },
        [{"x": [[], [[[]]]], "y": []}, {"x": [[], [], []]}, {"y": [1]}],
    ),
    (
        {"type": "object", "properties": {"value": NULL, "next": {"$ref": "#"}}, "required": ["value"]},
        [{"value": None, "next": {"value": None}}, {"value": None, "next": {"next": {"value": None}}}],
    ),
]
IDS = [json.dumps(schema)[:50] for schema, _ in SCHEMAS]


def dumped(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def allows(schema: Any, *texts: str) -> list[bool]:
    guide = json_schema_guide(schema, byte_level())
    return [guide.matches(token_ids(guide, text)) for text in texts]


@pytest.mark.parametrize(("schema", "values"), SCHEMAS, ids=IDS)
def test_texts_that_follow_a_guide_are_valid(schema: Schema, values: list[Any]) -> None:
    guide, validator, drawn = json_schema_guide(schema, common()), jsonschema.Draft202012Validator(schema), 0
    for seed in range(30):
        if (text := draw_json(guide, random.Random(seed))) is not None:
            assert validator.is_valid(json.loads(text)), text
            drawn += 1
    # A search for a pattern may go on for long before it finds a text that matches.
    assert drawn > (2 if "bc$" in str(schema) else 20)


@pytest.mark.parametrize(("schema", "values"), SCHEMAS, ids=IDS)
def test_a_guide_allows_the_valid_values_as_json_dumps_writes_them(schema: Schema, values: list[Any]) -> None:
    valid = [jsonschema.Draft202012Validator(schema).is_valid(value) for value in values]
    assert allows(schema, *map(dumped, values)) == valid
    assert any(valid)


def test_white_space_is_that_of_json_dumps() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "array"}, "b": {}}}
    right = '{"a": [1, 2], "b": {"c": [], "d": 5}}'
    wrong = [right.replace(": ", ":"), right.replace(", ", ","), right.replace("{", "{ "), f" {right}", f"{right} "]
    assert allows(schema, right, *wrong) == [True, *[False] * len(wrong)]


def test_properties_are_in_the_order_of_the_schema_and_others_after_them() -> None:
    schema = {"type": "object", "properties": {"a": NULL, "b": NULL}}
    texts = [dumped(dict.fromkeys(names)) for names in ("ab", "abc", "acd", "ba", "cab", "acb")]
    assert allows(schema, *texts) == [True, True, True, False, False, False]


json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**6), 10**6)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=["Cs", "Cc"])),
    lambda values: st.lists(values, max_size=3) | st.dictionaries(st.text("ab"), values, max_size=3),
    max_leaves=5,
)
ANY = json_schema_guide(True, byte_level())


@given(json_values)
def test_true_allows_any_json(value: Any) -> None:
    assert ANY.matches(token_ids(ANY, dumped(value)))


@pytest.mark.parametrize("name", ["date", "time", "date-time", "uuid", "email", "ipv4"])
def test_strings_of_a_format_have_that_format(name: str) -> None:
    guide = json_schema_guide({"type": "string", "format": name}, common())
    assert not guide.matches(token_ids(guide, '"a"'))
    for seed in range(20):
        text = draw_json(guide, random.Random(seed))
        if text is None:
            continue
        value = json.loads(text)
        if name in ("date", "ipv4"):
            assert jsonschema.FormatChecker().conforms(value, name), value
        if name == "date" and not value.startswith("0000"):
            datetime.date.fromisoformat(value)


#: Schemas, a part of the reason, and whether strict=False follows the rest.
REFUSED: list[tuple[Any, str, bool]] = [
    (5, "a JSON schema must be an object", False),
    ("{", "it is not JSON", False),
    ("[]", "a JSON schema must be an object", False),
    (False, "no value is valid for it", False),
    ("false", "no value is valid for it", False),
    ({"const": float("nan")}, "it is not JSON", False),
    ({"type": "null", "title": {1}}, "it is not JSON", False),
    ({"type": "text"}, "Invalid type: text", False),
    ({"not": {"pattern": "a"}}, "pattern within not, if or oneOf cannot be followed", True),
    ({"if": {"const": {}}, "then": NULL}, "an array or an object of a const or an enum within not", True),
    ({"if": {"multipleOf": 2}, "then": NULL}, "multipleOf within not, if or oneOf cannot be followed", True),
    ({"not": {"enum": ["a" * 500]}}, "so long texts within not", True),
    ({"type": "array", "uniqueItems": True}, '"uniqueItems"', True),
    ({"type": "array", "contains": NULL}, "contains with a schema cannot be followed", True),
    ({"not": {"$ref": "#/$defs/a"}, "$defs": {"a": {"anyOf": [NULL, {"$ref": "#/$defs/a"}]}}}, "leads to itself", True),
    ({"$ref": "#/$defs/a", "unevaluatedItems": False}, "points to nothing", False),
    ({"$ref": "#a", "unevaluatedItems": False}, "nothing has the anchor 'a'", False),
    ({"type": "object", "propertyNames": {"format": "date"}}, "propertyNames", True),
    ({"anyOf": [{"required": [f"{i}"]} for i in range(300)], "unevaluatedItems": False}, "more than 256 cases", True),
    ({"type": "object", "patternProperties": {"a": NULL, "b": NULL}}, "patternProperty", False),
    ({"oneOf": [{"multipleOf": 3}, {"multipleOf": 2}]}, "oneOf", True),
    ({"$ref": "#/$defs/A"}, "'/$defs/A' does not exist", False),
    ({"$ref": "http://localhost:1/a.json"}, "does not fetch", False),
    ({"type": "string", "format": "regex"}, "Unknown format: regex", True),
    ({"type": "string", "pattern": "["}, "has no end", True),
    ({"type": "string", "pattern": "b(?=a)"}, "look-ahead", True),
    ({"type": "string", "pattern": r"(a)\1"}, "cannot be followed", True),
    ({"type": "string", "pattern": 5}, "'pattern'", False),
    ({"type": "string", "maxLength": -1}, "maxLength", False),
    ({"type": "integer", "maxDigits": 3}, "maxDigits is not a keyword of JSON Schema 2020-12; write minimum and", True),
    ({"type": "integer", "minDigits": 3}, "minDigits is not a keyword of JSON Schema 2020-12; write minimum and", True),
    ({"type": "number", "maxDigitsFraction": 2}, "maxDigitsFraction is not a keyword", True),
    (
        {"type": "number", "divisibleBy": 2},
        "divisibleBy is not a keyword of JSON Schema 2020-12; write multipleOf",
        True,
    ),
    ({"items": {"anyOf": [NULL, {"maxDigits": 3}]}}, "maxDigits is not a keyword", True),
]


@pytest.mark.parametrize(("schema", "reason", "loosens"), REFUSED, ids=lambda value: str(value)[:50])
def test_what_cannot_be_followed_is_refused_or_loosened(schema: Any, reason: str, loosens: bool) -> None:
    with raises(InvalidGuide, reason=re.compile(re.escape(reason))):
        json_schema_guide(schema, common())
    if not loosens:
        with raises(InvalidGuide, reason=re.compile(re.escape(reason))):
            json_schema_guide(schema, common(), strict=False)
        return
    guide = json_schema_guide(schema, common(), strict=False)
    assert len(guide.loosened) == 1 and reason in guide.loosened[0]


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "integer", "minimum": 3, "maximum": 2},
        {"type": "string", "minLength": 2, "maxLength": 1},
        {"type": "array", "items": NULL, "minItems": 2, "maxItems": 1},
        {"type": "object", "properties": {"a": False}, "required": ["a"]},
        {"anyOf": []},
        {"enum": []},
        {"allOf": [True, False]},
        {"const": 5, "type": "string"},
    ],
    ids=str,
)
def test_schemas_without_a_valid_value_are_refused(schema: Schema) -> None:
    with raises(InvalidGuide, reason=re.compile("Unsatisfiable schema")):
        json_schema_guide(schema, common())


def test_a_loosened_guide_follows_the_other_keywords() -> None:
    schema = {
        "type": "object",
        "properties": {
            "a": {"type": "array", "items": {"type": "integer"}, "uniqueItems": True},
            "b": {"type": "string", "format": "regex", "maxLength": 3},
        },
        "required": ["a"],
    }
    guide = json_schema_guide(schema, common(), strict=False)
    assert any("uniqueItems" in text for text in guide.loosened) and any("regex" in text for text in guide.loosened)
    texts = ['{"a": [1, 1], "b": "x"}', '{"a": ["x"]}', '{"b": "x"}', '{"a": [], "b": "abcd"}']
    assert [guide.matches(token_ids(guide, text)) for text in texts] == [True, False, False, False]


def test_keywords_are_not_names_of_properties_or_parts_of_values() -> None:
    schema = {
        "type": "object",
        "properties": {"maxDigits": NULL, "extends": {"const": {"minDigits": 1}}},
        "default": {"divisibleBy": 2},
        "$defs": {"disallow": NULL},
    }
    text = '{"maxDigits": null, "extends": {"minDigits": 1}}'
    assert allows(schema, text) == [True] and json_schema_guide(schema, common(), strict=False).loosened == ()


def test_a_schema_as_text_and_as_a_class() -> None:
    schema: Schema = {"type": "object", "properties": {"a": NULL}, "required": ["a"]}

    class Model:
        @staticmethod
        def model_json_schema() -> Schema:
            return schema

    guides = [json_schema_guide(given, common()) for given in (schema, json.dumps(schema), Model)]
    assert len({guide.grammar for guide in guides}) == 1


def test_a_pydantic_class() -> None:
    pydantic = pytest.importorskip("pydantic")
    inner = pydantic.create_model("Inner", ok=(bool, ...), tags=(list[str], ...))
    outer = pydantic.create_model("Outer", name=(str | None, None), inner=(inner, ...), others=(dict[str, int], ...))
    guide = json_schema_guide(outer, common())
    value = outer(name="é", inner=inner(ok=True, tags=["a", "b"]), others={"x": 5})
    assert guide.matches(token_ids(guide, dumped(value.model_dump())))
    for seed in range(20):
        if (text := draw_json(guide, random.Random(seed))) is not None:
            outer.model_validate_json(text)


def test_strings_are_in_any_language() -> None:
    guide: Guide = json_schema_guide({"type": "string"}, byte_level())
    assert guide.matches(token_ids(guide, '"日本語 ½ \\n"'))
    quote, byte = token_ids(guide, '"'), [guide.tokens.texts.index(b"\xc3")]
    assert not guide.matches([*quote, *byte, *quote])


@pytest.mark.parametrize(
    ("pattern", "right", "wrong"),
    [
        ("a|b", ["xay", "b"], ["c"]),
        ("^a|b$", ["ax", "xb"], ["xa"]),
        (r"^(?<name>a)$", ["a"], ["b"]),
        (r"^\p{L}\D\W$", ["é٣é"], ["1é٣", "é1é", "éé_"]),
        ("^[^a]$", ["b", "é", '\\"', "\\n"], ["a", "bb", "\n"]),
    ],
)
def test_patterns_are_searched_in_the_value_of_a_string(pattern: str, right: list[str], wrong: list[str]) -> None:
    texts = [f'"{text}"' for text in right + wrong]
    assert allows({"type": "string", "pattern": pattern}, *texts) == [text in right for text in right + wrong]


def test_a_long_text_is_followed_up_to_its_length() -> None:
    guide = json_schema_guide({"type": "string", "maxLength": 200}, byte_level())
    for length in (0, 200, 201):
        assert guide.matches(token_ids(guide, json.dumps('"' * length))) == (length <= 200)

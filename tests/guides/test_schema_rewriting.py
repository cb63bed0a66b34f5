"""Schemas with keywords that llguidance does not have: guides allow exactly the valid values."""

from __future__ import annotations

import contextlib
import itertools
import json
import re
from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from speccompile.errors import InvalidGuide
from speccompile.guides import Guide, json_schema_guide
from speccompile.guides.disjoint import are_disjoint
from support.errors import raises
from support.guide_tokenizers import byte_level, token_ids

#: Without numbers with a fraction, which are refused where a schema negates ``integer``.
SCALARS: list[Any] = [None, True, False, 0, 3, 7, "", "a", "abc"]
VALUES: list[Any] = [
    *SCALARS,
    *([], [0], ["a"], [0, "a"], [0, 3, "a"]),
    *({}, {"a": 0}, {"b": "a"}, {"a": 3, "b": 0}, {"a": "abc", "c": True}, {"a": 0, "b": 0, "c": 0}),
]


def orders(value: Any) -> Iterator[Any]:
    """``value`` with its properties in every order."""
    if not isinstance(value, dict):
        yield value
        return
    yield from map(dict, itertools.permutations(value.items()))


def allows(guide: Guide, value: Any) -> bool:
    """Whether the guide allows ``value`` in some order of its properties."""
    return any(guide.matches(token_ids(guide, json.dumps(item))) for item in orders(value))


NAMES = st.sampled_from(["a", "b"])
ASSERTIONS = st.one_of(
    st.fixed_dictionaries(
        {"type": st.sampled_from(["null", "boolean", "integer", "number", "string", "array", "object"])}
    ),
    st.fixed_dictionaries({"const": st.sampled_from(SCALARS)}),
    st.fixed_dictionaries({"enum": st.lists(st.sampled_from(SCALARS), min_size=1, max_size=3)}),
    st.fixed_dictionaries({"required": st.lists(NAMES, min_size=1, max_size=2, unique=True)}),
    st.builds(
        lambda name, bound: {name: bound},
        st.sampled_from(["minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"]),
        st.integers(0, 4),
    ),
    st.builds(
        lambda name, bound: {name: bound},
        st.sampled_from(["minLength", "maxLength", "minItems", "maxItems"]),
        st.integers(0, 2),
    ),
)


def larger(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    some = st.lists(inner, min_size=1, max_size=2)
    named = st.dictionaries(NAMES, inner, min_size=1, max_size=2)
    return st.one_of(
        st.fixed_dictionaries({"not": inner}),
        st.fixed_dictionaries({"if": inner, "then": inner}, optional={"else": inner}),
        st.fixed_dictionaries({"oneOf": st.lists(inner, min_size=2, max_size=3)}),
        st.fixed_dictionaries({"anyOf": some}),
        st.fixed_dictionaries({"allOf": some}),
        st.fixed_dictionaries({"properties": named}),
        st.fixed_dictionaries({"prefixItems": some}),
        st.fixed_dictionaries({"dependentSchemas": named}),
        st.fixed_dictionaries({"dependentRequired": st.dictionaries(NAMES, st.lists(NAMES, max_size=2, unique=True))}),
        st.builds(
            lambda parts, name, value: {"allOf": parts, name: value},
            some,
            st.sampled_from(["unevaluatedProperties", "unevaluatedItems"]),
            st.one_of(st.just(False), inner),
        ),
        st.builds(lambda first, second: {**first, **second}, inner, inner),
    )


SCHEMAS = st.recursive(ASSERTIONS, larger, max_leaves=5).filter(lambda schema: len(json.dumps(schema)) < 400)


@settings(deadline=None, max_examples=60)
@given(schema=SCHEMAS)
def test_exactly_the_valid_values_are_allowed(schema: dict[str, Any]) -> None:
    validator = jsonschema.Draft202012Validator(schema)
    valid = [value for value in VALUES if validator.is_valid(value)]
    try:
        guide = json_schema_guide(schema, byte_level())
    except InvalidGuide as error:
        reason = str(error.fields["reason"])
        # A schema for which nothing is valid, or only values that are not among these.
        refused = "Unsatisfiable" in reason or "matches nothing" in reason
        known = any(part in reason for part in ("cannot be followed", "oneOf constraints", "cases", "leads to itself"))
        assert known or (refused and not valid), reason
        return
    assert [value for value in VALUES if allows(guide, value)] == valid


def test_nested_schemas_do_not_multiply_without_end() -> None:
    schema: dict[str, Any] = {"type": "null"}
    for _ in range(20):
        schema = {"properties": {"a": schema}, "unevaluatedProperties": False}
    with raises(InvalidGuide, reason=re.compile("too many cases")):
        json_schema_guide(schema, byte_level())


@settings(deadline=None, max_examples=100)
@given(first=SCHEMAS, second=SCHEMAS)
def test_disjoint_schemas_have_no_value_in_common(first: dict[str, Any], second: dict[str, Any]) -> None:
    if are_disjoint(first, second, lambda _: True, lambda: None):
        one, other = (jsonschema.Draft202012Validator(schema) for schema in (first, second))
        assert not [value for value in VALUES if one.is_valid(value) and other.is_valid(value)]


@pytest.mark.parametrize(
    "schema",
    [
        *({"oneOf": 5}, {"if": 3}, {"not": 5}, {"dependentRequired": []}, {"dependentSchemas": 5}, {"contains": 5}),
        *({"propertyNames": 5}, {"not": {"type": 5}}, {"not": {"enum": 5}}, {"not": {"minLength": "a"}}),
        *({"not": {"type": "x"}}, {"not": {"required": "ab"}}, {"allOf": 5, "not": {"const": 1}}),
        *({"$ref": 5, "unevaluatedProperties": False}, {"properties": 5, "unevaluatedProperties": False}),
        {"allOf": 5, "format": "int32", "minimum": 1},
        {"propertyNames": {"enum": ["a", "b"], "const": "a"}},
        {"$ref": "#/$defs/a", "$dynamicRef": "#b", "$defs": {"a": {}, "b": {"$dynamicAnchor": "b"}}},
        {"anyOf": [{"required": [f"{index}"], "properties": {f"{index}": {}}} for index in range(25)]}
        | {"unevaluatedProperties": False},
        {"$defs": {f"{i}": {"allOf": [{"$ref": f"#/$defs/{i + 1}"}] * 2} for i in range(20)} | {"20": {"type": "null"}}}
        | {"not": {"$ref": "#/$defs/0"}},
        {"$defs": {f"{i}": {"anyOf": [{"$ref": f"#/$defs/{i + 1}"}] * 6} for i in range(7)} | {"7": {"const": "x"}}}
        | {"oneOf": [{"$ref": "#/$defs/0"}, {"const": "y"}, {"minLength": 5}]},
    ],
    ids=lambda schema: json.dumps(schema)[:60],
)
def test_schemas_that_are_not_valid_or_have_endless_cases_are_refused(schema: dict[str, Any]) -> None:
    with raises(InvalidGuide):
        json_schema_guide(schema, byte_level())
    with contextlib.suppress(InvalidGuide):
        assert json_schema_guide(schema, byte_level(), strict=False).loosened


def test_schemas_that_nest_too_deeply_are_refused() -> None:
    schema: dict[str, Any] = {"type": "null"}
    for _ in range(1500):
        schema = {"not": schema}
    for given_ in (schema, '{"not":' * 1500 + "{}" + "}" * 1500):
        # The reason depends on the recursion limit of the process.
        with raises(InvalidGuide):
            json_schema_guide(given_, byte_level())


OLD, OLDER = "https://json-schema.org/draft/2019-09/schema", "http://json-schema.org/draft-0{}/schema#"
IN_DRAFTS: list[tuple[dict[str, Any], Any, bool]] = [
    (
        {"$schema": OLD, "properties": {"p": {"items": [{"type": "integer"}]}}, "if": {"required": ["p"]}}
        | {"then": {"required": ["q"]}},
        {"p": ["x"], "q": 1},
        False,
    ),
    ({"$schema": OLD, "type": "array", "items": [{}], "additionalItems": False, "not": {"const": 5}}, [1], True),
    ({"$schema": OLD, "type": "array", "items": [{}], "additionalItems": False, "not": {"const": 5}}, [1, 2], False),
    ({"$schema": OLDER.format(4), "not": {"allOf": [{"type": "string"}, {"const": 5}]}}, "a", False),
    ({"$schema": OLDER.format(4), "not": {"minimum": 5, "exclusiveMinimum": True}}, 5, True),
    ({"$schema": OLDER.format(4), "not": {"minimum": 5, "exclusiveMinimum": True}}, 6, False),
    ({"$schema": OLDER.format(7), "dependencies": {"a": ["b"]}}, {"a": 1}, False),
    ({"$schema": OLDER.format(7), "dependencies": {"a": ["b"], "c": {"maxProperties": 1}}}, {"c": 1}, True),
    ({"$schema": OLDER.format(7), "dependencies": {"a": ["b"], "c": {"maxProperties": 1}}}, {"c": 1, "d": 1}, False),
    ({"$schema": OLDER.format(7), "not": {"$ref": "#/definitions/a", "minimum": 5}}
     | {"definitions": {"a": {"type": "null"}}}, 3, True),
    ({"$defs": {"r": {"$anchor": "a", "type": "string"}, "z": {"const": {"$anchor": "a", "type": "null"}}}}
     | {"not": {"$ref": "#a"}}, "x", False),
    ({"$defs": {'a"': {"type": "string"}, "a%22": {"type": "integer"}}, "not": {"$ref": "#/$defs/a%2522"}}, 1, False),
    ({"oneOf": [{"const": {"a": 1}}, {"const": {"a": 1.0}}]}, {"a": 1}, False),
    (
        {"$defs": {"base": {"properties": {"a": {"type": "integer"}}}}, "type": "object", "if": {"required": ["k"]}}
        | {"then": {"$ref": "#/$defs/base", "properties": {"k": {}}, "unevaluatedProperties": False}},
        {"k": 1, "a": 1},
        True,
    ),
    ({"allOf": [{"dependentSchemas": {"a": {"prefixItems": [{}]}}}], "unevaluatedItems": False}, [0], False),
    ({"if": {"const": False}, "then": {"const": 0}}, False, False),
    ({"not": {"type": "integer", "format": "int32"}}, 2**40, False),
    ({"allOf": [{"contains": {"type": "string"}, "minContains": 0}], "unevaluatedItems": False}, ["a"], True),
    (
        {"properties": {"a": {}, "b": {}, "c": {}}, "allOf": [{"if": {"properties": {"b": {"const": 1}}}}]}
        | {"not": {"required": ["d"]}},
        {"a": 5, "b": 5},
        True,
    ),
]  # fmt: skip


@pytest.mark.parametrize(("schema", "value", "valid"), IN_DRAFTS, ids=lambda item: json.dumps(item)[:50])
def test_values_of_earlier_drafts_and_of_references(schema: dict[str, Any], value: Any, valid: bool) -> None:
    validator = jsonschema.validators.validator_for(schema, jsonschema.Draft202012Validator)
    assert validator(schema).is_valid(value) == valid
    try:
        guide = json_schema_guide(schema, byte_level())
    except InvalidGuide:
        return
    assert allows(guide, value) == valid


def test_a_document_of_several_resources_is_refused() -> None:
    inner = {"$id": "http://a/b", "$defs": {"x": {"type": "string"}}, "not": {"$ref": "#/$defs/x"}}
    schema = {"$id": "http://a/root", "$defs": {"x": {"type": "integer"}}, "properties": {"p": inner}}
    with raises(InvalidGuide, reason=re.compile(r"with several \$id")):
        json_schema_guide(schema, byte_level())

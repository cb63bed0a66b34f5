"""Schemas with keywords that llguidance does not have: guides allow exactly the valid values."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator
from typing import Any

import jsonschema
from hypothesis import given, settings
from hypothesis import strategies as st

from speccompile.errors import InvalidGuide
from speccompile.guides import Guide, json_schema_guide
from speccompile.guides.disjoint import are_disjoint
from support.errors import raises
from support.guide_tokenizers import byte_level, token_ids

#: No number with a fraction: what is no integer has none.
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
    with raises(InvalidGuide, reason=re.compile("have more than 20000 cases")):
        json_schema_guide(schema, byte_level())


@settings(deadline=None, max_examples=100)
@given(first=SCHEMAS, second=SCHEMAS)
def test_disjoint_schemas_have_no_value_in_common(first: dict[str, Any], second: dict[str, Any]) -> None:
    if are_disjoint(first, second, lambda _: True):
        one, other = (jsonschema.Draft202012Validator(schema) for schema in (first, second))
        assert not [value for value in VALUES if one.is_valid(value) and other.is_valid(value)]

"""The official test suite of JSON Schema 2020-12: guides allow no invalid value, and refuse what they cannot follow."""

from __future__ import annotations

import itertools
import json
import random
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema

from speccompile.errors import InvalidGuide
from speccompile.guides import Guide, json_schema_guide
from support.guide_tokenizers import byte_level, draw_json, token_ids

SUITE = Path(__file__).parent / "json_schema_test_suite"
#: Of the 383 schemas.
LEAST_FOLLOWED = 293

#: Reasons why a schema is refused, where strict=False leaves a keyword out.
LEFT_OUT = (r"Unimplemented keys: \[", r"Unknown format: ", r".* cannot be followed", r"circular references ")
#: Reasons why a schema is refused in any case.
REFUSED = (
    r"Unsatisfiable schema: ",
    r"no value is valid for it",
    # A schema at another address.
    r"Resource '.*' is not present",
    r"the reference '.*' leads to another document, which is not read",
    r"Value for 'multipleOf' has too many digits",
    r"patternProperty regexes /.*/ and /.*/ are not disjoint",
)

#: Valid values, by the suite's descriptions, that guides do not allow.
NOT_ALLOWED = {
    # A number with a fraction is neither an integer nor not an integer.
    "oneOf: second oneOf valid",
    # A const and each value of an enum have one order of properties and one form of a number.
    "const with 0 does not match other zero-like types: float zero is valid",
    "const with 1 does not match true: float one is valid",
    "const with -2.0 matches integer and float types: float -2.0 is valid",
    "float and integers are equal up to 64-bit representation limits: float is valid",
    "enum with 0 does not match false: float zero is valid",
    "enum with [0] does not match [false]: [0.0] is valid",
    "enum with 1 does not match true: float one is valid",
    "enum with [1] does not match [true]: [1.0] is valid",
    "integer type matches integers: a float with zero fractional part is an integer",
    # A format restricts strings. JSON Schema permits both readings.
    *(
        f"{name} format: invalid {name} string is only an annotation by default"
        for name in (
            "email",
            "ipv4",
            "ipv6",
            "hostname",
            "date",
            "date-time",
            "time",
            "uri",
            "uuid",
            "duration",
            "json-pointer",
            "relative-json-pointer",
        )
    ),
}


@dataclass(frozen=True)
class Case:
    """A schema of the suite, its tests, and its guide or the reason for a refusal."""

    name: str
    schema: Any
    tests: list[dict[str, Any]]
    guide: Guide | None
    reason: str = ""


@cache
def cases() -> list[Case]:
    found = []
    for path in sorted(SUITE.glob("*.json")):
        for case in json.loads(path.read_text()):
            name, schema, tests = case["description"], case["schema"], case["tests"]
            try:
                found.append(Case(name, schema, tests, json_schema_guide(schema, byte_level())))
            except InvalidGuide as error:
                found.append(Case(name, schema, tests, None, error.fields["reason"]))
    return found


def followed() -> list[tuple[Case, Guide]]:
    return [(case, case.guide) for case in cases() if case.guide is not None]


def is_allowed(guide: Guide, value: Any) -> bool:
    """Whether ``guide`` allows ``value`` in some order of its own properties: no schema says all of them."""
    orders = map(dict, itertools.permutations(value.items())) if isinstance(value, dict) else [value]
    return any(guide.matches(token_ids(guide, json.dumps(item, ensure_ascii=False))) for item in orders)


def in_order(value: Any, schema: Any) -> Any:
    """``value`` with the properties of its objects in the order of ``schema``."""
    known = schema if isinstance(schema, dict) else {}
    if isinstance(value, dict):
        properties = known.get("properties", {})
        names = [*(name for name in properties if name in value), *(name for name in value if name not in properties)]
        return {name: in_order(value[name], properties.get(name)) for name in names}
    if isinstance(value, list):
        first = known.get("prefixItems", [])
        schemas = [*first, *[known.get("items")] * len(value)]
        return [in_order(item, of) for item, of in zip(value, schemas, strict=False)]
    return value


@cache
def allowed_values() -> list[tuple[str, bool, bool]]:
    """Name, whether it is valid, and whether the guide allows it, of each value of a schema that is followed."""
    found = []
    for case, guide in followed():
        for test in case.tests:
            value, name = in_order(test["data"], case.schema), f"{case.name}: {test['description']}"
            found.append((name, test["valid"], is_allowed(guide, value)))
    return found


def test_these_many_schemas_are_followed() -> None:
    assert len(cases()) == 383 and len(followed()) >= LEAST_FOLLOWED


def test_no_invalid_value_is_allowed() -> None:
    assert [name for name, valid, allowed in allowed_values() if allowed and not valid] == []


def test_valid_values_are_allowed_with_known_exceptions() -> None:
    assert {name for name, valid, allowed in allowed_values() if valid and not allowed} == NOT_ALLOWED


def test_a_refusal_gives_its_reason() -> None:
    for case in cases():
        if case.guide is None:
            assert re.match("|".join(LEFT_OUT + REFUSED), case.reason), (case.name, case.reason)
            if case.reason.startswith("Unimplemented keys") and "/schema" not in str(case.schema.get("$ref")):
                # A schema that refers to the metaschema has the keys of that.
                for key in json.loads(case.reason.partition(": ")[2]):
                    assert f'"{key}":' in json.dumps(case.schema), (case.name, case.reason)


def test_random_texts_are_valid() -> None:
    drawn = 0
    for case, guide in followed():
        if r"\\p" in json.dumps(case.schema):
            # jsonschema searches with Python's re, which does not have it.
            continue
        validator = jsonschema.Draft202012Validator(case.schema)
        for seed in range(3):
            text = draw_json(guide, random.Random(seed))
            if text is not None:
                assert validator.is_valid(json.loads(text)), (case.name, text)
                drawn += 1
    assert drawn > 2.5 * len(followed())


def test_without_strict_schemas_with_keywords_that_cannot_be_followed_are_loosened() -> None:
    for case in cases():
        if case.guide is not None:
            assert case.guide.loosened == ()
            continue
        try:
            assert json_schema_guide(case.schema, byte_level(), strict=False).loosened, case.name
        except InvalidGuide:
            assert re.match("|".join(REFUSED), case.reason), case.name


def test_a_guide_has_nothing_loosened_if_strict_follows_the_schema() -> None:
    for case, guide in followed()[::7]:
        loose = json_schema_guide(case.schema, byte_level(), strict=False)
        assert loose.loosened == () and loose.grammar == guide.grammar

"""Arguments of calls are those that tools name, unless a schema decides about others or may need them."""

from __future__ import annotations

from typing import Any

import pytest

from speccompile.errors import InvalidGuide
from speccompile.serve.closed_arguments import close_arguments
from speccompile.serve.tool_grammar import CallSyntax, GrammarTool, ToolGrammar
from support.guides_of_tools import allows, call_text

PLACE = {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}
CLOSED = PLACE | {"additionalProperties": False}
TAGS = CallSyntax("<tool_call>", "</tool_call>", "arguments")


def around(part: Any) -> dict[str, Any]:
    """A schema with ``part`` wherever a schema may be."""
    return {
        "properties": {"a": part, "b": {"anyOf": [part, {"type": "null"}]}, "c": {"type": "array", "items": part}},
        "$defs": {"Part": part},
    }


def test_every_object_that_names_properties_is_closed() -> None:
    given = around(PLACE)
    assert close_arguments(given) == around(CLOSED) | {"additionalProperties": False}
    assert given == around(PLACE)


@pytest.mark.parametrize("more", [True, {"type": "integer"}, False])
def test_what_a_schema_decides_stays(more: Any) -> None:
    given = PLACE | {"additionalProperties": more}
    assert close_arguments(given) == given


def test_objects_without_names_stay_open() -> None:
    given = {"properties": {"map": {"type": "object"}, "counts": {"additionalProperties": PLACE}}}
    closed = {"map": {"type": "object"}, "counts": {"additionalProperties": CLOSED}}
    assert close_arguments(given) == {"properties": closed, "additionalProperties": False}


@pytest.mark.parametrize(
    "more",
    [
        {"minProperties": 2},
        {"required": ["name", "other"]},
        {"required": [["name"]]},
        {"allOf": [{"required": ["other"]}]},
        {"dependentRequired": {"name": ["other"]}},
        {"patternProperties": {"^x": {}}},
        {"not": {"maxProperties": 1}},
    ],
)
def test_a_schema_that_may_need_other_properties_stays(more: dict[str, Any]) -> None:
    for given in (PLACE | more, {"properties": {"inner": PLACE | more}}):
        assert close_arguments(given) == given


def test_a_name_that_is_a_keyword_is_a_name() -> None:
    given = {"properties": {"not": {"type": "string"}, "minProperties": PLACE}}
    closed = {"not": {"type": "string"}, "minProperties": CLOSED}
    assert close_arguments(given) == {"properties": closed, "additionalProperties": False}


def test_a_schema_that_nests_too_deeply_is_refused() -> None:
    given: dict[str, Any] = {}
    for _ in range(5000):
        given = {"items": given}
    with pytest.raises(InvalidGuide, match="nests too deeply"):
        close_arguments(given)


def test_calls_of_the_server_have_named_arguments_alone() -> None:
    for schema, open_ in ((PLACE, False), (PLACE | {"additionalProperties": True}, True)):
        grammar = ToolGrammar((GrammarTool("weather", schema),), TAGS, required=True, parallel=False)
        assert allows(grammar, call_text(TAGS, arguments='{"name": "Oslo"}'))
        assert allows(grammar, call_text(TAGS, arguments='{"name": "Oslo", "x": 1}')) == open_

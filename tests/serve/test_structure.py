"""Structured outputs, and the limits on compiling guides."""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from speccompile import Speculator
from speccompile.errors import InvalidGuide
from speccompile.serve import structure
from speccompile.serve.guide_compiler import GuideCompiler
from speccompile.serve.guide_process import GuideSource
from speccompile.serve.json_object import json_object_regex
from speccompile.serve.options import ServeOptions
from support.errors import raises
from support.serving import Client, tokenizer

COMPLETIONS = "/v1/completions"
#: As many states as there are subsets of 22 places: compiling it takes gigabytes and minutes.
HUGE = "(?:[ab]*a[ab]{22})"
SCHEMA = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"], "additionalProperties": False}


@pytest.fixture(scope="module")
def compiler() -> Iterator[GuideCompiler]:
    compiler = GuideCompiler(
        tokenizer(), ServeOptions(max_guide_seconds=2, max_guide_states=50, max_guide_megabytes=256)
    )
    yield compiler
    compiler.close()


@pytest.mark.parametrize(
    "fields",
    [
        {"guided_json": SCHEMA},
        {"guided_json": json.dumps(SCHEMA)},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "strict": True, "schema": SCHEMA}}},
    ],
)
def test_a_schema_is_followed(client: Client, fields: dict[str, Any]) -> None:
    choice = client.complete("ab", max_tokens=40, **fields)["choices"][0]
    assert choice["finish_reason"] == "stop" and set(json.loads(choice["text"])) == {"a"}


def test_a_json_object_is_followed(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    # Three levels take seconds to compile.
    monkeypatch.setattr(structure, "json_object_regex", lambda: json_object_regex(1))
    # A quote and a brace as soon as they may come, so that it ends.
    bias = {str(token): 60 for text in ('"', "}") for token in tokenizer()(text)["input_ids"]}
    answer = client.chat("ab", response_format={"type": "json_object"}, max_tokens=60, logit_bias=bias)
    choice = answer["choices"][0]
    assert choice["finish_reason"] == "stop" and isinstance(json.loads(choice["message"]["content"]), dict)


@pytest.mark.parametrize(
    ("value", "levels"),
    [
        ({}, 1),
        ({"a": 1, "é": -2.5, "b": [], "c": {}}, 2),
        ({"a": [1, "x", None], "b": {"c": True}}, 2),
        ({"a": [{"b": 0.5}]}, 3),
        ({"a": {"b": [1, 2]}}, 3),
    ],
)
def test_json_objects_nest_up_to_the_depth(value: Any, levels: int) -> None:
    for depth in (1, 2, 3):
        pattern = re.sub(r"\\x\{([0-9A-F]+)\}", lambda found: rf"\U{int(found[1], 16):08x}", json_object_regex(depth))
        for text in (
            json.dumps(value, ensure_ascii=False),
            json.dumps(value, separators=(",", ":"), ensure_ascii=False),
        ):
            assert bool(re.fullmatch(pattern, text)) == (depth >= levels), (text, depth)
        assert not re.fullmatch(pattern, "[1]") and not re.fullmatch(pattern, '{"a": 01}')


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"guided_regex": "(a"}, "guided_regex"),
        ({"guided_json": {"type": "integer", "minimum": 3}}, "guided_json"),
        ({"guided_json": "{"}, "guided_json"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {}}}},
            "response_format",
        ),
        ({"guided_regex": "a", "ignore_eos": True}, "guided_regex"),
    ],
)
def test_a_guide_that_cannot_be_followed_is_named(client: Client, fields: dict[str, Any], param: str) -> None:
    error = client.refused(COMPLETIONS, {"prompt": "ab"} | fields)
    assert error["param"] == param, error


def test_guides_are_compiled_once(compiler: GuideCompiler) -> None:
    source = GuideSource("regex", "[ab]{3}")
    assert compiler.guide(source) is compiler.guide(source)
    assert compiler.guide(source).matches(tokenizer()("aba")["input_ids"])


def test_too_many_states_are_refused(compiler: GuideCompiler) -> None:
    with raises(InvalidGuide, reason=re.compile("states, and the server allows 50")):
        compiler.guide(GuideSource("regex", "a{60}"))


def test_a_compilation_beyond_the_limits_is_ended_and_the_next_one_works() -> None:
    for megabytes, says in ((4000, "takes longer than 2 s"), (128, "more than 128 MiB")):
        options = ServeOptions(max_guide_seconds=2 if megabytes == 4000 else 60, max_guide_megabytes=megabytes)
        limited = GuideCompiler(tokenizer(), options)
        limited.start()
        started = time.monotonic()
        with raises(InvalidGuide, reason=re.compile(says)):
            limited.guide(GuideSource("regex", HUGE))
        assert time.monotonic() - started < 30
        assert limited.guide(GuideSource("regex", "ab")).matches(tokenizer()("ab")["input_ids"])
        limited.close()


def test_others_are_served_while_a_guide_is_compiled(client: Client, spec: Speculator) -> None:
    done = threading.Event()
    client.service.guides.start()

    def compile_slowly() -> None:
        client.post(COMPLETIONS, {"prompt": "ab", "guided_regex": "(?:[ab]*a[ab]{15})"})
        done.set()

    thread = threading.Thread(target=compile_slowly)
    thread.start()
    served = 0
    while not done.is_set() and served < 5:
        client.complete("ab", max_tokens=2)
        served += 1
    assert served >= 1
    thread.join(60)

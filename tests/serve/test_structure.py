"""Structured outputs, and the limits on compiling guides."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import itertools
import json
import re
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any
from unittest import mock

import pytest

from speccompile.errors import InvalidGuide, QueueFull
from speccompile.guides import Guide
from speccompile.sampling.guide import GuideFollower
from speccompile.serve import structure
from speccompile.serve.fields import CompletionBody
from speccompile.serve.guide_compiler import _MOST_WAITING, GuideCompiler
from speccompile.serve.guide_source import ANY_OBJECT, GuideSource
from speccompile.serve.options import ServeOptions
from support.errors import raises
from support.serving import Client, tokenizer

COMPLETIONS = "/v1/completions"
LETTERS = "abcdefghijklmnopqrst"
#: Whether a text matches all of these patterns takes a minute and gigabytes to find out.
HUGE = json.dumps(
    {"allOf": [{"type": "string", "pattern": f"[a-z]*{letter}[a-z]*"} for letter in "abcdefghijklmnopqrst"]}
)
#: Guides are kept, so each slow one has a number of its own.
NUMBERS = itertools.count()
SCHEMA = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"], "additionalProperties": False}


@pytest.fixture(scope="module")
def compiler() -> Iterator[GuideCompiler]:
    compiler = GuideCompiler(tokenizer(), ServeOptions(max_guide_seconds=2, max_guide_megabytes=256))
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


@pytest.mark.parametrize(
    "fields",
    [
        {"guided_regex": "(?:yes|no)!"},
        {"response_format": {"type": "grammar", "syntax": "regex", "definition": "(?:yes|no)!"}},
        {"structured_outputs": {"regex": "(?:yes|no)!"}},
        {"structured_outputs": {"choice": ["yes!", "no!"]}},
        {"structured_outputs": {"grammar": 'start: ("yes" | "no") "!"'}},
        {"response_format": {"type": "grammar", "syntax": "lark", "definition": 'start: ("yes" | "no") "!"'}},
        {"guided_grammar": 'root ::= ("yes" | "no") "!"'},
        {"guided_choice": ["yes!", "no!"]},
    ],
)
def test_a_pattern_is_followed(client: Client, fields: dict[str, Any]) -> None:
    choice = client.complete("ab", max_tokens=9, **fields)["choices"][0]
    assert choice["finish_reason"] == "stop" and choice["text"] in ("yes!", "no!")


@pytest.mark.parametrize("stream", [False, True])
def test_a_complete_text_ends_before_min_tokens(client: Client, stream: bool) -> None:
    fields = {"max_tokens": 20, "min_tokens": 15, "guided_regex": "(?:yes|no)!"}
    if stream:
        chunks = [chunk["choices"][0] for chunk in client.stream(COMPLETIONS, {"prompt": "ab", **fields})]
        text, reason = "".join(chunk["text"] for chunk in chunks), chunks[-1]["finish_reason"]
    else:
        choice = client.complete("ab", **fields)["choices"][0]
        text, reason = choice["text"], choice["finish_reason"]
    assert text in ("yes!", "no!") and reason == "stop"


def test_drafts_that_break_a_schema_and_a_love_of_spaces_change_nothing(client: Client) -> None:
    """An object comes to its end, with one space after commas and colons."""
    properties = {
        "kind": {"enum": ["ok", "no"]},
        "numbers": {"type": "array", "items": {"enum": [1, 22]}, "maxItems": 2},
    }
    schema = {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}
    vocabulary = client.service.vocabulary
    bias = {str(token): 9 for token in range(len(tokenizer())) if vocabulary.bytes_of(token).isspace()}
    prediction = {"type": "content", "content": '```json\n{"kind": "ok", "numbers": [1,  22, 1]}\n```'}
    for seed in range(2):
        fields = {"temperature": 1.0, "seed": seed, "max_tokens": 120, "logit_bias": bias, "guided_json": schema}
        ways = ({"num_draft_tokens": 0}, {"num_draft_tokens": 3}, {"prediction": prediction})
        (text,) = {client.complete("ab", **fields, **way)["choices"][0]["text"] for way in ways}
        found = json.loads(text)
        assert found["kind"] in ("ok", "no") and len(found["numbers"]) <= 2 and not re.search(r"\s{3}", text)


def test_a_trigger_begins_a_structure(client: Client) -> None:
    tag = {"begin": "<f=a>", "schema": SCHEMA, "end": "</f>"}
    form = {"type": "structural_tag", "structures": [tag], "triggers": ["<f="]}
    choice = client.complete("ab", max_tokens=4, response_format=form)["choices"][0]
    assert choice["finish_reason"] == "length"
    source, field = structure.source_of(CompletionBody(prompt="a", response_format=form))
    guide = client.service.guides.guide(source).result()
    assert field == "response_format"
    for text, allowed in (("a < b", True), ('a<f=a>{"a": true}</f>b', True), ("<f=b>", False), ("<f=a>{}</f>", False)):
        assert guide.matches(tokenizer()(text)["input_ids"]) == allowed, text
    for wrong in ({"triggers": ["<g"]}, {"structures": [tag | {"schema": {"not": {}}}]}):
        assert (
            client.refused(COMPLETIONS, {"prompt": "a", "response_format": form | wrong})["param"] == "response_format"
        )


def test_choices_are_texts_not_patterns(client: Client) -> None:
    choices = ["a.c", "(a", "a b\n", "é{2}"]
    guide = client.service.guides.guide(
        structure.source_of(CompletionBody(prompt="a", structured_outputs={"choice": choices}))[0]
    ).result()
    for text in [*choices, "abc", "a", "éé", "a b"]:
        assert guide.matches(tokenizer()(text)["input_ids"]) == (text in choices), text


def test_structured_outputs_of_vllm_have_schemas(client: Client) -> None:
    for schema in (SCHEMA, json.dumps(SCHEMA)):
        choice = client.complete("ab", max_tokens=40, structured_outputs={"json": schema})["choices"][0]
        assert set(json.loads(choice["text"])) == {"a"}


def test_a_json_object_is_followed(client: Client) -> None:
    # A quote and a brace as soon as they may come, so that it ends.
    bias = {str(token): 60 for text in ('"', "}") for token in tokenizer()(text)["input_ids"]}
    answer = client.chat("ab", response_format={"type": "json_object"}, max_tokens=60, logit_bias=bias)
    choice = answer["choices"][0]
    assert choice["finish_reason"] == "stop" and isinstance(json.loads(choice["message"]["content"]), dict)


@pytest.mark.parametrize("value", [{}, {"a": 1, "é": -2.5e9, "b": [], "c": {}}, {"a": [{"b": {"c": [[{"d": 0.5}]]}}]}])
def test_json_objects_nest(compiler: GuideCompiler, value: Any) -> None:
    guide = compiler.guide(GuideSource("json_schema", ANY_OBJECT)).result()
    assert guide.matches(tokenizer()(json.dumps(value, ensure_ascii=False))["input_ids"])
    for wrong in ("[1]", '{"a": 01}', '{"a" : 1}'):
        assert not guide.matches(tokenizer()(wrong)["input_ids"])


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"guided_regex": "(a"}, "guided_regex"),
        ({"guided_json": {"type": "array", "uniqueItems": True}}, "guided_json"),
        ({"guided_json": "{"}, "guided_json"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"not": {}}}}},
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
    guide = compiler.guide(source).result()
    assert guide is compiler.guide(source).result() and guide.matches(tokenizer()("aba")["input_ids"])


def test_automata_of_the_last_guides_are_kept(compiler: GuideCompiler, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("speccompile.serve.guide_compiler._KEPT_AUTOMATA", 2)
    sources = [GuideSource("regex", f"[ab]{{5}}{number}") for number in range(4)]
    guides = [compiler.guide(source).result() for source in sources]
    assert [guide.is_compiled for guide in guides] == [False, False, True, True]
    text = guides[2].matcher()
    assert compiler.guide(sources[2]).result() is guides[2]
    # The same guide, without another check of its source.
    with mock.patch.object(compiler, "_compile", side_effect=AssertionError):
        assert compiler.guide(sources[0]).result() is guides[0]
    assert [guide.is_compiled for guide in guides] == [True, False, True, False]
    # A known guide does not wait for a check, so it needs no place in that queue.
    monkeypatch.setattr("speccompile.serve.guide_compiler._MOST_WAITING", -1)
    with raises(QueueFull):
        compiler.guide(GuideSource("regex", "[ab]{5}new"))
    compiler.guide(sources[1]).result()
    assert not guides[2].is_compiled and text.consume_tokens(tokenizer()("ababa2")["input_ids"])


def test_long_sources_are_forgotten_early(compiler: GuideCompiler, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("speccompile.serve.guide_compiler._KEPT_CHARACTERS", 2500)
    sources = [GuideSource("choice", json.dumps([f"{number}" * 1000])) for number in range(1, 4)]
    for source in sources:
        compiler.guide(source).result()
    assert list(compiler._kept) == sources[1:]


def test_failures_are_kept(compiler: GuideCompiler) -> None:
    source, errors = GuideSource("regex", "(a"), []
    for _ in range(2):
        with raises(InvalidGuide) as caught:
            compiler.guide(source).result()
        errors.append(caught.value)
    assert errors[0].fields == errors[1].fields and source in compiler._kept
    # Not one exception, which would keep the frames of all that raised it.
    assert errors[0] is not errors[1] and compiler._kept[source].__traceback__ is None


def test_a_process_that_is_ended_from_outside_is_no_failure_of_its_guide(compiler: GuideCompiler) -> None:
    source = GuideSource("regex", f"[ab]{{4}}{next(NUMBERS)}")
    compiler.start()
    process = compiler._running
    process.process.kill()
    process.process.join()
    with raises(InvalidGuide), mock.patch.object(compiler, "_ready_process", lambda: process):
        compiler.guide(source).result()
    assert compiler.guide(source).result()


def test_a_pattern_beyond_the_limits_of_its_library_ends_its_request_alone(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(follower: GuideFollower) -> None:
        raise follower._failed("too many expressions constructed")

    body = {"prompt": "ab", "guided_regex": "[ab]+", "max_tokens": 60}
    monkeypatch.setattr(GuideFollower, "_mask", failing)
    answer = client.post(COMPLETIONS, body)
    assert answer.status_code == 400 and answer.json()["error"]["code"] == "invalid_guide", answer.json()
    assert client.complete("ab", max_tokens=2)["usage"]["completion_tokens"] == 2


@pytest.mark.parametrize(("seconds", "megabytes"), [(1, 8000), (60, 64)])
def test_a_compilation_beyond_the_limits_is_ended_and_the_next_one_works(seconds: int, megabytes: int) -> None:
    limited = GuideCompiler(tokenizer(), ServeOptions(max_guide_seconds=seconds, max_guide_megabytes=megabytes))
    limited.start()
    with raises(InvalidGuide, reason=re.compile(f"more than {seconds} s of CPU time or {megabytes} MiB")):
        limited.guide(GuideSource("json_schema", HUGE)).result()
    assert limited.guide(GuideSource("regex", "ab")).result().matches(tokenizer()("ab")["input_ids"])
    limited.close()


@pytest.mark.parametrize(
    "schema", ['{"enum": ["a"], "type": {"x": 1}}', '{"const": "\\ud800"}', '{"const": ' + "9" * 5000 + "}"]
)
def test_a_guide_that_fails_in_an_unexpected_way_is_refused_and_ends_no_process(
    compiler: GuideCompiler, schema: str
) -> None:
    compiler.start()
    process = compiler._running.process
    with raises(InvalidGuide):
        compiler.guide(GuideSource("json_schema", schema)).result()
    assert compiler.guide(GuideSource("regex", f"[ab]{{2}}{next(NUMBERS)}")).result()
    assert compiler._running.process is process and process.is_alive()


def test_after_the_end_of_a_process_the_next_guide_does_not_wait_for_a_start(compiler: GuideCompiler) -> None:
    compiler.start()
    spare = compiler._spare.process
    compiler._running.process.kill()
    compiler._running.process.join()
    assert compiler.guide(GuideSource("regex", f"[ab]{{3}}{next(NUMBERS)}")).result()
    assert compiler._running.process is spare and compiler._spare.process.is_alive()


def test_slow_guides_keep_no_other_request_waiting(client: Client) -> None:
    """More of them than the server has threads, and each takes as long as it may."""
    known = {"prompt": "ab", "guided_regex": "ab", "max_tokens": 4}
    assert client.post(COMPLETIONS, known).status_code == 200
    service = client.service
    with slow_guides(service.guides, 12) as waiting:
        assert client.complete("ab", max_tokens=2)["usage"]["completion_tokens"] == 2
        assert client.post(COMPLETIONS, known).status_code == 200
        assert not any(guide.done() for guide in waiting)


def test_a_guide_that_no_client_waits_for_is_not_compiled(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[GuideSource] = []
    guides = client.service.guides
    real = guides._compile
    monkeypatch.setattr(guides, "_compile", lambda source, process: (compiled.append(source), real(source, process))[1])

    async def leave() -> None:
        async with client.connected() as connection:
            body = {"prompt": "ab", "guided_regex": "c{7}"}
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(connection.post(COMPLETIONS, json=body), 0.2)

    with slow_guides(guides, 1):
        asyncio.run(leave())
    assert guides.guide(GuideSource("regex", "c{8}")).result()
    assert GuideSource("regex", "c{7}") not in compiled


def test_too_many_guides_are_a_429(client: Client) -> None:
    with slow_guides(client.service.guides, _MOST_WAITING + 1):
        answer = client.post(COMPLETIONS, {"prompt": "ab", "guided_regex": "d"})
        assert answer.status_code == 429 and int(answer.headers["retry-after"]) >= 1
    assert client.post(COMPLETIONS, {"prompt": "ab", "guided_regex": "d"}).status_code == 200


@contextlib.contextmanager
def slow_guides(compiler: GuideCompiler, count: int) -> Iterator[list[Future[Guide]]]:
    """``count`` guides of which the first is being compiled; they end with the context."""
    compiler.start()
    released = threading.Event()
    real = compiler._compile

    def compile_later(source: GuideSource, process: Any) -> Guide:
        released.wait(60)
        return real(source, process)

    with mock.patch.object(compiler, "_compile", compile_later):
        waiting = [compiler.guide(GuideSource("regex", f"slow{next(NUMBERS)}")) for _ in range(count)]
        try:
            yield waiting
        finally:
            for guide in waiting:
                guide.cancel()
            released.set()
            concurrent.futures.wait(waiting, 60)


def test_closing_does_not_wait_for_a_compilation() -> None:
    compiler = GuideCompiler(tokenizer(), ServeOptions(max_guide_seconds=60, max_guide_megabytes=8000))
    compiler.start()
    guide = compiler.guide(GuideSource("json_schema", HUGE))
    time.sleep(0.3)
    assert guide.running()
    started = time.monotonic()
    compiler.close()
    assert time.monotonic() - started < 10 and isinstance(guide.exception(), InvalidGuide)

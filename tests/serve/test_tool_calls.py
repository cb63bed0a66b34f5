"""Tools: the grammar of calls, calls read out of a text, and calls of the tiny model."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from benchmarks.tool_schemas import is_valid, random_schema
from speccompile.serve.fields import ChatBody
from speccompile.serve.tool_grammar import CallSyntax, GrammarTool, ToolGrammar, syntax_of
from speccompile.serve.tool_reader import CallReader
from speccompile.serve.tools import Calls, ParsedCall, grammar_of
from support.guides_of_tools import allows, call_text, guide_of
from support.serving import Client, tokenizer

CHAT = "/v1/chat/completions"
USER = {"role": "user", "content": "the end"}
TAGS, PLAIN = syntax_of("<tool_call>"), syntax_of("{{ message }}")
CITY = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 8}},
    "required": ["city"],
    "additionalProperties": False,
}


WEATHER, NO_ARGUMENTS = GrammarTool("weather", CITY), GrammarTool("now", None)


def test_the_syntax_follows_the_template() -> None:
    assert CallSyntax("<tool_call>", "</tool_call>", "arguments") == TAGS
    assert CallSyntax("", "", "arguments") == PLAIN
    llama = 'Respond in the format {"name": function name, "parameters": dictionary of argument name and its value}.'
    assert syntax_of(llama) == CallSyntax("", "", "parameters")


@pytest.mark.parametrize("syntax", [TAGS, PLAIN, CallSyntax("", "", "parameters")])
@pytest.mark.parametrize("required", [True, False])
def test_a_grammar_has_calls_and_texts(syntax: CallSyntax, required: bool) -> None:
    grammar = ToolGrammar((WEATHER, NO_ARGUMENTS), syntax, required, parallel=True)
    assert ToolGrammar.of_text(grammar.as_text()) == grammar
    assert allows(grammar, call_text(syntax)) and allows(grammar, call_text(syntax, "now", "{}"))
    two = call_text(syntax) + "\n" + call_text(syntax, "now", "{}")
    assert allows(grammar, two) == (syntax is TAGS)
    for wrong in (call_text(syntax, "other"), call_text(syntax, arguments='{"city": 5}'), call_text(syntax)[:-3]):
        assert not allows(grammar, wrong)
    for text in ("hello", "a <b> < < <tool", "", "<tool_cal", "x <<tool_call"):
        assert allows(grammar, text) != required
    assert allows(grammar, "I see.\n" + call_text(syntax)) == (not required)
    single = ToolGrammar(grammar.tools, syntax, required, parallel=False)
    assert not (syntax is TAGS and allows(single, two))


def test_arguments_are_objects_also_where_a_schema_allows_more() -> None:
    nullable = CITY | {"type": ["object", "null"]}
    grammar = ToolGrammar((GrammarTool("weather", nullable),), TAGS, required=True, parallel=False)
    assert allows(grammar, call_text(TAGS)) and not allows(grammar, call_text(TAGS, arguments="null"))


def test_no_text_that_contains_a_mark_is_free() -> None:
    grammar = ToolGrammar((NO_ARGUMENTS,), TAGS, False, parallel=True)
    guide, rng = guide_of(grammar), random.Random(0)
    for _ in range(300):
        text = "".join(rng.choices(["<", "tool", "_call", ">", "<tool_call", "t", "o"], k=rng.randint(1, 9)))
        free = guide.matches(tokenizer()(text, add_special_tokens=False)["input_ids"])
        assert free == ("<tool_call>" not in text), text


OSLO, NOW = ParsedCall("weather", '{"city": "Oslo"}', True), ParsedCall("now", "{}", True)
NESTED = r'{"city": "}\"]{\\", "more": [{"a": {}}]}'


@pytest.mark.parametrize("size", [1, 2, 7, 1000])
@pytest.mark.parametrize(
    ("syntax", "written", "text", "calls"),
    [
        (TAGS, "hello < there", "hello < there", []),
        (TAGS, "Hi.\n" + call_text(TAGS) * 2, "Hi.", [OSLO, OSLO]),
        (TAGS, call_text(TAGS) + "\n" + call_text(TAGS, "now", "{}"), "", [OSLO, NOW]),
        (TAGS, call_text(TAGS, arguments=NESTED), "", [ParsedCall("weather", NESTED, True)]),
        (TAGS, "a <tool", "a <tool", []),
        (TAGS, "a" + call_text(TAGS)[:-19], "a", [ParsedCall("weather", '{"city": "O')]),
        (TAGS, "a" + call_text(TAGS)[:30], "a", []),
        (TAGS, call_text(TAGS)[:-9], "", [OSLO]),
        (PLAIN, call_text(PLAIN), "", [OSLO]),
        (PLAIN, call_text(PLAIN, arguments=NESTED), "", [ParsedCall("weather", NESTED, True)]),
        (PLAIN, "a " + call_text(PLAIN), "a " + call_text(PLAIN), []),
        (PLAIN, call_text(PLAIN)[:-3], "", [ParsedCall("weather", '{"city": "Oslo')]),
        (PLAIN, call_text(PLAIN)[:9], "", []),
    ],
)
def test_calls_are_read_out_of_a_text_in_pieces(
    syntax: CallSyntax, written: str, text: str, calls: list[ParsedCall], size: int
) -> None:
    grammar = ToolGrammar((WEATHER, NO_ARGUMENTS), syntax, required=False, parallel=True)
    reader, read, deltas = CallReader(grammar), Calls(), []
    seen = ""
    pieces = [reader.add(written[start : start + size]) for start in range(0, len(written), size)]
    for items in [*pieces, reader.end(cut=False)]:
        seen += "".join(item for item in items if isinstance(item, str))
        deltas += read.add(items)
    assert (seen, read) == (text, calls)
    # What a client joins of a stream.
    joined = [ParsedCall("") for _ in calls]
    for delta in deltas:
        assert delta.function is not None and (delta.function.name is None) == (delta.id is None)
        joined[delta.index].name += delta.function.name or ""
        joined[delta.index].arguments += delta.function.arguments or ""
    assert [(call.name, call.arguments) for call in joined] == [(call.name, call.arguments) for call in calls]


@pytest.mark.parametrize(
    ("written", "required", "shown"),
    [("<tool", False, ""), ("a <tool", False, "a "), ("a <", False, "a <"), ("<", True, "")],
)
def test_the_beginning_of_a_mark_at_a_limit_is_no_text(written: str, required: bool, shown: str) -> None:
    reader = CallReader(ToolGrammar((NO_ARGUMENTS,), TAGS, required, parallel=True))
    assert "".join(map(str, [*reader.add(written), *reader.end(cut=True)])) == shown


NAMED = {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}


@pytest.mark.parametrize("size", [1, 3, 1000])
@pytest.mark.parametrize("syntax", [TAGS, PLAIN])
def test_beside_an_answer_in_a_form_calls_are_told_by_their_beginning(syntax: CallSyntax, size: int) -> None:
    grammar = ToolGrammar((WEATHER,), syntax, False, parallel=True, answer=("json_schema", json.dumps(NAMED)))
    assert ToolGrammar.of_text(grammar.as_text()) == grammar
    answer = '{"name": "wea <tool_call>"}'
    for written, text, calls in ((answer, answer, []), (call_text(syntax), "", [OSLO])):
        reader, read, seen = CallReader(grammar), Calls(), []
        pieces = [reader.add(written[start : start + size]) for start in range(0, len(written), size)]
        for items in [*pieces, reader.end(cut=False)]:
            seen += [item for item in items if isinstance(item, str)]
            read.add(items)
        assert ("".join(seen), read) == (text, calls) and (size > 1 or not seen or len(seen) > 3)
        assert allows(grammar, written)
    assert not allows(grammar, "hello") and not allows(grammar, "hello\n" + call_text(syntax))


@pytest.mark.parametrize("kind", ["json_schema", "regex"])
def test_tools_and_a_form_of_the_answer_are_followed_together(client: Client, kind: str) -> None:
    form: dict[str, Any] = {"guided_regex": "(?:yes|no)!"}
    if kind == "json_schema":
        schema = {"properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": False}
        schema |= {"type": "object"}
        form = {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}}
    fields = form | {
        "tools": [{"type": "function", "function": {"name": "now"}}],
        "max_tokens": 80,
        "parallel_tool_calls": False,
    }
    text_of = client.service.vocabulary.text_of
    calls = {
        str(token): -100
        for token in range(len(tokenizer()))
        if text_of(token).startswith("<t") or text_of(token) == "<"
    }
    text = client.chat("call", **fields, logit_bias=calls)["choices"][0]["message"]["content"]
    assert json.loads(text)["a"] in (1, 2) if kind == "json_schema" else text in ("yes!", "no!")
    forced = client.chat("call", **fields, tool_choice="required")["choices"][0]
    assert forced["message"]["tool_calls"][0]["function"]["name"] == "now"
    never = client.chat("call", **fields, tool_choice="none")["choices"][0]["message"]
    assert never["content"][0] in "{yn" and "tool_calls" not in never


def test_no_tools_are_as_if_the_field_were_left_out(client: Client) -> None:
    for choice in ("auto", "none"):
        assert client.chat("ab", tools=[], tool_choice=choice)["choices"] == client.chat("ab")["choices"]


def test_calls_with_random_schemas_are_valid_and_the_same_without_drafts(client: Client) -> None:
    rng, finished = random.Random(1), 0
    for index in range(12):
        schemas = {f"tool_{number}": random_schema(rng) for number in range(rng.randint(1, 2))}
        tools = [{"type": "function", "function": {"name": name, "parameters": schemas[name]}} for name in schemas]
        fields = {
            **{"tools": tools, "tool_choice": "required", "parallel_tool_calls": False},
            **{"temperature": 1.0, "seed": index, "max_tokens": 180},
        }
        drafted, plain = client.chat("call", **fields), client.chat("call", **fields, num_draft_tokens=0)
        choices = [answer["choices"][0] for answer in (drafted, plain)]
        calls = [[call["function"] for call in choice["message"].get("tool_calls") or []] for choice in choices]
        assert calls[0] == calls[1] and choices[0]["finish_reason"] == choices[1]["finish_reason"]
        if choices[0]["finish_reason"] == "length":
            continue
        finished += 1
        assert choices[0]["finish_reason"] == "tool_calls"
        ((call,),) = calls[:1]
        assert is_valid(json.loads(call["arguments"]), schemas[call["name"]])
    assert finished >= 9


def test_arguments_are_streamed_as_they_come(client: Client) -> None:
    tools = [{"type": "function", "function": {"name": "weather", "parameters": CITY}}]
    fields = {"tools": tools, "tool_choice": "required", "parallel_tool_calls": False, "max_tokens": 140}
    whole = client.chat("call", **fields)["choices"][0]
    chunks = client.stream(CHAT, {"messages": [{"role": "user", "content": "call"}], **fields})
    deltas = [
        call for chunk in chunks for choice in chunk["choices"] for call in choice["delta"].get("tool_calls") or []
    ]
    assert len(deltas) > 3 and [set(delta) for delta in deltas[:2]] == [
        {"index", "id", "type", "function"},
        {"index", "function"},
    ]
    function = whole["message"]["tool_calls"][0]["function"]
    assert "".join(delta["function"]["arguments"] for delta in deltas) == function["arguments"]
    assert deltas[0]["function"]["name"] == function["name"] == "weather"
    assert chunks[-1]["choices"][0]["finish_reason"] == whole["finish_reason"] == "tool_calls"


def test_a_call_that_is_cut_is_unfinished_and_not_reported_as_one(client: Client) -> None:
    tools = [{"type": "function", "function": {"name": "weather", "parameters": CITY}}]
    choice = client.chat("call", tools=tools, tool_choice="required", max_tokens=48)["choices"][0]
    (call,) = choice["message"]["tool_calls"]
    assert choice["finish_reason"] == "length" and call["function"]["arguments"].startswith("{")
    with pytest.raises(json.JSONDecodeError):
        json.loads(call["function"]["arguments"])


def test_auto_may_answer_in_text(client: Client) -> None:
    answer = client.chat("call", tools=[{"type": "function", "function": {"name": "now"}}], max_tokens=8)
    assert set(answer["choices"][0]["message"]) == {"role", "content"}
    assert answer["choices"][0]["finish_reason"] == "length"


def test_tools_are_in_the_prompt_unless_the_choice_is_none(client: Client) -> None:
    tools = [{"type": "function", "function": {"name": "now", "description": "the time"}}]
    body = {"messages": [USER], "tools": tools, "max_tokens": 1, "temperature": 0}
    shown, hidden = (client.post(CHAT, body | more).json()["usage"] for more in ({}, {"tool_choice": "none"}))
    assert shown["prompt_tokens"] > hidden["prompt_tokens"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [{"type": "search"}]}, "tools[0].type"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
        ({"tools": [{"type": "function", "function": {"name": "a"}}] * 2}, "tools"),
        (
            {"tools": [{"type": "function", "function": {"name": "a", "strict": True, "parameters": {"not": {}}}}]},
            "tools[0].function.parameters",
        ),
        (
            {
                "tools": [{"type": "function", "function": {"name": "a"}}],
                "tool_choice": {"type": "function", "function": {"name": "b"}},
            },
            "tool_choice.function.name",
        ),
        ({"tools": [{"type": "function", "function": {"name": "a"}}], "tool_choice": "any"}, "tool_choice"),
        ({"tools": [], "tool_choice": "required"}, "tool_choice"),
        ({"tools": [{"type": "function", "function": {"name": "a"}}], "guided_regex": "("}, "guided_regex"),
    ],
)
def test_tools_that_cannot_be_followed_are_named(client: Client, fields: dict[str, Any], param: str) -> None:
    error = client.refused(CHAT, {"messages": [USER]} | fields)
    assert error["param"] == param, error


def test_what_a_tool_that_is_not_strict_cannot_have_followed_is_left_out(
    client: Client, caplog: pytest.LogCaptureFixture
) -> None:
    parameters = CITY | {"properties": {"city": {"enum": ["Oslo"], "not": {"pattern": "Rome"}}}}
    function = {"name": "weather", "parameters": parameters}
    fields = {"tool_choice": "required", "parallel_tool_calls": False, "max_tokens": 140}
    for _ in range(2):
        choice = client.chat("call", tools=[{"type": "function", "function": function}], **fields)["choices"][0]
        (call,) = choice["message"]["tool_calls"]
        assert json.loads(call["function"]["arguments"]) == {"city": "Oslo"}
    assert len([line for line in caplog.messages if line.startswith("weather: ") and "not" in line]) == 1
    strict = {"messages": [USER], "tools": [{"type": "function", "function": function | {"strict": True}}]}
    error = client.refused(CHAT, strict)
    assert error["param"] == "tools[0].function.parameters" and "within not" in error["message"]


def test_some_tools_may_be_allowed(client: Client) -> None:
    tools = [{"type": "function", "function": {"name": name}} for name in ("now", "weather", "then")]

    def allowed(mode: str, *names: str) -> dict[str, Any]:
        chosen = [{"type": "function", "function": {"name": name}} for name in names]
        return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": chosen}}

    fields = {"tools": tools, "parallel_tool_calls": False, "max_tokens": 90}
    choice = client.chat("the end", **fields, tool_choice=allowed("required", "then"))["choices"][0]
    assert [call["function"]["name"] for call in choice["message"]["tool_calls"]] == ["then"]
    body = ChatBody.model_validate({"messages": [USER], "tools": tools, "tool_choice": allowed("auto", "now", "now")})
    grammar = grammar_of(body, tokenizer())
    assert grammar is not None and [tool.name for tool in grammar.tools] == ["now"] and not grammar.required
    for choice in (allowed("required", "other"), allowed("never", "now"), allowed("auto")):
        error = client.refused(CHAT, {"messages": [USER], "tools": tools, "tool_choice": choice})
        assert error["param"].startswith("tool_choice.allowed_tools")

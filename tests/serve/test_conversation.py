"""Conversations as chat templates accept them: tools that a template does not write, and the spellings of clients."""

from __future__ import annotations

import json
from typing import Any

import pytest

from speccompile.serve.chat_template import call_syntax
from speccompile.serve.fields import ChatBody
from speccompile.serve.message_fields import Message
from speccompile.serve.prompts import chat_ids
from speccompile.serve.template_fields import TemplateFields
from speccompile.serve.tool_fields import Tool
from speccompile.serve.tool_grammar import DEFAULT_SYNTAX, CallSyntax, GrammarTool, ToolGrammar, syntax_of
from speccompile.serve.tool_reader import CallReader
from speccompile.serve.tools import Calls, ParsedCall, grammar_of
from support.serving import Client, tokenizer

CHAT = "/v1/chat/completions"
WRITES_ROLES = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
REFUSES_ROLES = (
    "{% for m in messages %}{% if m.role in ('system', 'tool') %}{{ raise_exception('no such role') }}{% endif %}"
    "<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
)
WRITES_TOOLS = "{{ tools }} {" + '"name": , "parameters": dictionary}' + WRITES_ROLES
TOOL = {
    "type": "function",
    "function": {"name": "get_rain", "description": "é", "parameters": {"type": "object", "properties": {}}},
}
USER = {"role": "user", "content": "rain?"}


def call(name: str = "get_rain", arguments: Any = '{"city": "Oslo"}', **more: Any) -> dict[str, Any]:
    return {"id": f"of_{name}", "type": "function", "function": {"name": name, "arguments": arguments}, **more}


def result(name: str, content: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": f"of_{name}", "content": content}


def prompt(messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None = None) -> str:
    read = [Message.model_validate(message) for message in messages]
    given = None if tools is None else [Tool.model_validate(tool) for tool in tools]
    ids = chat_ids(tokenizer(), read, given, TemplateFields(add_generation_prompt=False))
    return str(tokenizer().decode(ids, skip_special_tokens=False))


@pytest.fixture
def template(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(tokenizer(), "chat_template", request.param)
    return str(request.param)


@pytest.mark.parametrize("template", [WRITES_ROLES], indirect=True)
def test_tools_that_a_template_does_not_write_are_in_the_system_message(template: str) -> None:
    for messages, before in (
        ([USER], "<|system|>"),
        ([{"role": "system", "content": "Be brief."}, USER], "<|system|>Be brief.\n\n"),
    ):
        text = prompt(messages, [TOOL])
        assert text.startswith(f"{before}You can call these functions:\n") and text.endswith(
            "<|end|><|user|>rain?<|end|>"
        )
        assert f"\n{json.dumps(TOOL['function'], ensure_ascii=False)}\n" in text and "<tool_call>" in text
    assert prompt([USER]) == "<|user|>rain?<|end|>"
    assert call_syntax(tokenizer()) == DEFAULT_SYNTAX


@pytest.mark.parametrize(("template", "parallel"), [(WRITES_ROLES, False), (WRITES_TOOLS, True)], indirect=["template"])
def test_only_a_model_that_knows_tools_may_call_several_at_a_time(template: str, parallel: bool) -> None:
    grammar = grammar_of(ChatBody.model_validate({"messages": [USER], "tools": [TOOL]}), tokenizer())
    assert grammar is not None and grammar.parallel == parallel


@pytest.mark.parametrize("template", [REFUSES_ROLES], indirect=True)
def test_without_system_messages_tools_are_in_the_users_first_one(template: str) -> None:
    text = prompt([USER, {"role": "assistant", "content": "No."}, USER], [TOOL])
    assert text.startswith("<|user|>You can call these functions:\n") and text.count("get_rain") == 1
    assert text.endswith("</tool_call>\n\nrain?<|end|><|assistant|>No.<|end|><|user|>rain?<|end|>")


@pytest.mark.parametrize("template", [WRITES_ROLES, REFUSES_ROLES, WRITES_TOOLS], indirect=True)
def test_calls_and_results_that_a_template_does_not_write_are_texts(template: str) -> None:
    messages = [
        USER,
        {"role": "assistant", "content": "See:", "tool_calls": [call(), call("now", "{}")]},
        result("get_rain", 'a "lot"'),
        result("now", "12"),
        USER,
    ]
    syntax = syntax_of(template) if template is WRITES_TOOLS else DEFAULT_SYNTAX
    assert call_syntax(tokenizer()) == syntax
    calls = [syntax.text_of("get_rain", {"city": "Oslo"}), syntax.text_of("now", {})]
    results = ['{"name": "get_rain", "content": "a \\"lot\\""}', '{"name": "now", "content": "12"}']
    shown = "\n".join(f"<tool_response>\n{text}\n</tool_response>" for text in results)
    assert prompt(messages).endswith(f"<|assistant|>See:\n{calls[0]}\n{calls[1]}<|end|><|user|>{shown}\n\nrain?<|end|>")


@pytest.mark.parametrize("syntax", [DEFAULT_SYNTAX, CallSyntax("", "", "parameters")])
def test_the_text_of_a_call_is_read_as_that_call(syntax: CallSyntax) -> None:
    reader, calls = (
        CallReader(ToolGrammar((GrammarTool("get_rain", None),), syntax, required=False, parallel=False)),
        Calls(),
    )
    calls.add([*reader.add(syntax.text_of("get_rain", {"a": [1]})), *reader.end(cut=False)])
    assert calls == [ParsedCall("get_rain", '{"a": [1]}', complete=True)]


def test_a_template_that_writes_tools_is_given_them_as_they_are() -> None:
    messages = [
        USER,
        {"role": "assistant", "content": "", "tool_calls": [call(arguments={"n": 7})]},
        result("get_rain", "12"),
    ]
    ids = tokenizer().apply_chat_template(messages, tools=[TOOL], return_dict=True)["input_ids"]
    assert prompt(messages, [TOOL]) == tokenizer().decode(ids, skip_special_tokens=False)


@pytest.mark.parametrize(
    ("sent", "same"),
    [
        (
            {**USER, "content": [{"type": "text", "text": "a"}, {"type": "input_text", "text": "b"}]},
            {**USER, "content": "a\nb"},
        ),
        (
            {**USER, "content": [{"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}, "b"]},
            {**USER, "content": "a\nb"},
        ),
        ({**USER, "content": None, "cache_control": {}, "mood": "good"}, {**USER, "content": ""}),
        ({"role": "assistant", "refusal": "No."}, {"role": "assistant", "content": "No."}),
        (
            {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]},
            {"role": "assistant", "content": "No."},
        ),
        ({"role": "assistant"}, {"role": "assistant", "content": ""}),
        ({"role": "assistant", "content": "a", "tool_calls": []}, {"role": "assistant", "content": "a"}),
        (
            {"role": "assistant", "content": "a", "reasoning": "b", "annotations": [{}]},
            {"role": "assistant", "content": "a"},
        ),
        (
            {"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": '{"n": 1}'}},
            {"role": "assistant", "content": "", "tool_calls": [call("f", '{"n": 1}')]},
        ),
        ({"role": "function", "name": "f", "content": "12"}, {"role": "tool", "tool_call_id": "a", "content": "12"}),
        *(
            (
                {"role": "assistant", "tool_calls": [call("f", arguments, index=0)]},
                {"role": "assistant", "content": "", "tool_calls": [call("f", whole)]},
            )
            for arguments, whole in (
                ("", "{}"),
                (None, "{}"),
                ({"n": 2}, '{"n": 2}'),
                ('{"n": "2', '{"n": "2"}'),
                ('{"n": [1, {"a": 2', '{"n": [1, {"a": 2}]}'),
                ('{"n": 2, "b', '{"n": 2}'),
            )
        ),
    ],
)
def test_spellings_of_clients_are_the_same_message(sent: dict[str, Any], same: dict[str, Any]) -> None:
    assert prompt([sent]) == prompt([same])


def test_fields_that_the_api_does_not_have_reach_the_template(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenizer(), "chat_template", "{{ messages[0].mood }}{{ messages[0].reasoning_content }}")
    assert prompt([{**USER, "mood": "good", "reasoning": "so"}]) == "goodso"


@pytest.mark.parametrize("stream", [False, True])
def test_a_call_that_is_cut_in_its_head_is_no_content(client: Client, stream: bool) -> None:
    body = {"messages": [USER], "tools": [TOOL], "tool_choice": "required", "temperature": 0}
    for limit in (1, 4, 12):
        if stream:
            choices = [chunk["choices"][0] for chunk in client.stream(CHAT, body | {"max_tokens": limit})]
            assert not any(choice["delta"].get("content") or choice["delta"].get("tool_calls") for choice in choices)
        else:
            choices = client.post(CHAT, body | {"max_tokens": limit}).json()["choices"]
            assert choices[0]["message"] == {"role": "assistant", "content": None}
        assert choices[-1]["finish_reason"] == "length"
    calls = client.post(CHAT, body | {"max_tokens": 80}).json()["choices"][0]["message"]["tool_calls"]
    assert calls[0]["function"]["name"] == "get_rain"

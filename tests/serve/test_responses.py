"""``/v1/responses``: the same text as a chat, for the ``openai`` client too."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from speccompile.serve.responses_fields import ResponsesBody
from speccompile.serve.responses_output import Output
from speccompile.serve.tool_reader import Arguments, CallBegin
from support import serving
from support.serving import MODEL, Client

PATH = "/v1/responses"
CITY = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 3}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "name": name,
        "description": "a",
        "parameters": CITY if name == "weather" else None,
        "strict": False,
    }
    for name in ("weather", "now", "read", "write", "list", "run")
]
CALL = {"type": "function_call", "call_id": "a", "name": "f"}
PER_CHUNK = "stream_options.continuous_usage_stats"
OUTPUT_TEXT = [{"type": "output_text", "text": "e", "annotations": [], "logprobs": []}]
SCHEMA = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": False}


@pytest.fixture(scope="module")
def openai_client(client: Client) -> Iterator[openai.OpenAI]:
    with (
        serving.listening(client.service, lifespan="off") as address,
        openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0) as made,
    ):
        yield made


def test_the_text_is_that_of_a_chat(client: Client, openai_client: openai.OpenAI) -> None:
    chat = client.chat("the end", max_tokens=24)
    answer = openai_client.responses.create(model=MODEL, input="the end", max_output_tokens=24, temperature=0)
    assert answer.output_text == chat["choices"][0]["message"]["content"]
    assert answer.status == "incomplete" and answer.incomplete_details.reason == "max_output_tokens"
    assert (answer.usage.input_tokens, answer.usage.output_tokens) == (chat["usage"]["prompt_tokens"], 24)
    assert answer.metrics["speculative_decoding"]["num_spec_tokens"] == 3


#: Fields that change the text of a chat.
SAMPLING: dict[str, dict[str, Any]] = {
    "seed": {"temperature": 1.2, "seed": 5},
    "top_k": {"temperature": 1.2, "seed": 5, "top_k": 2},
    "min_p": {"temperature": 1.2, "seed": 5, "min_p": 0.5},
    "typical_p": {"temperature": 1.2, "seed": 5, "typical_p": 0.2},
    "repetition_penalty": {"repetition_penalty": 9},
    "presence_penalty": {"logit_bias": {"90": 3}, "presence_penalty": 2},
    "frequency_penalty": {"logit_bias": {"90": 3}, "frequency_penalty": 2},
    "logit_bias": {"logit_bias": {"90": 100}},
    "stop": {"logit_bias": {"90": 100}, "stop": ["vvv", ""]},
    "stop_token_ids": {"logit_bias": {"90": 100}, "stop_token_ids": [90]},
    "min_tokens": {"logit_bias": {"90": 100}, "stop_token_ids": [90], "min_tokens": 3, "ignore_eos": True},
    "skip_special_tokens": {"logit_bias": {"2": 100}, "skip_special_tokens": False},
    "structured_outputs": {"structured_outputs": {"regex": "a{3}"}},
    "add_generation_prompt": {"add_generation_prompt": False},
}


@pytest.mark.parametrize("name", SAMPLING)
def test_a_field_of_a_chat_has_its_effect(client: Client, name: str) -> None:
    def text_of(fields: dict[str, Any]) -> str:
        body = {"input": "the end", "max_output_tokens": 12, "temperature": 0, **fields}
        answer = client.post(PATH, body)
        assert answer.status_code == 200, answer.text
        return "".join(item["content"][0]["text"] for item in answer.json()["output"])

    fields = SAMPLING[name]
    less = {key: value for key, value in fields.items() if key != name}
    chat = client.chat("the end", **{"max_tokens": 12, **fields})
    assert text_of(fields) == chat["choices"][0]["message"]["content"] != text_of(less)


def test_drafts_and_template_variables_are_those_of_a_chat(client: Client) -> None:
    body = {"input": "the end of the end of the", "max_output_tokens": 12, "temperature": 0, "n": 1}
    for fields, drafts in (({"num_draft_tokens": 0}, False), ({}, True)):
        answer = client.post(PATH, body | fields).json()
        assert (answer["metrics"]["speculative_decoding"]["num_draft_tokens"] > 0) is drafts, answer
    variables = {"chat_template_kwargs": {"a": 1}, "text": {"verbosity": "low"}, "reasoning": {"effort": "high"}}
    chat = ResponsesBody.model_validate({"input": "a", **variables}).as_chat()
    found = {name: value for _, named in chat.template_variables() for name, value in named.items()}
    assert found == {"a": 1, "verbosity": "low", "reasoning_effort": "high", "enable_thinking": True}


def assert_are(found: list[Any], wanted: list[dict[str, Any]]) -> None:
    """The last bits may differ: a prompt that is known by now is processed in other shapes."""
    assert [item.token for item in found] == [item["token"] for item in wanted]
    assert [item.logprob for item in found] == pytest.approx([item["logprob"] for item in wanted], abs=1e-5)


@pytest.mark.parametrize("fields", [{}, {"temperature": 1.2, "seed": 5}, {"stop": "b"}])
def test_log_probabilities_are_those_of_a_chat(
    client: Client, openai_client: openai.OpenAI, fields: dict[str, Any]
) -> None:
    chat = client.chat("the end", max_tokens=9, logprobs=True, top_logprobs=2, **fields)
    wanted = chat["choices"][0]["logprobs"]["content"]
    extra = {name: fields[name] for name in fields if name != "temperature"}
    asked: dict[str, Any] = {
        **{"model": MODEL, "input": "the end", "max_output_tokens": 9, "temperature": fields.get("temperature", 0)},
        **{"include": ["message.output_text.logprobs"], "top_logprobs": 2, "extra_body": extra},
    }
    whole = openai_client.responses.create(**asked)
    part = whole.output[0].content[0]
    assert part.text == chat["choices"][0]["message"]["content"] and whole.top_logprobs == 2
    assert_are(part.logprobs, wanted)
    assert all(len(item.top_logprobs) == 2 and bytes(item.bytes) for item in part.logprobs if item.token)
    events = list(openai_client.responses.create(**asked, stream=True))
    deltas = [item for event in events if event.type == "response.output_text.delta" for item in event.logprobs]
    assert_are(deltas, wanted)
    assert_are(events[-1].response.output[0].content[0].logprobs, wanted)
    (done,) = [event for event in events if event.type == "response.output_text.done"]
    assert len(done.logprobs) == len(wanted)


def test_instructions_and_earlier_answers_are_messages(client: Client, openai_client: openai.OpenAI) -> None:
    fields: dict[str, Any] = {"model": MODEL, "temperature": 0, "max_output_tokens": 12, "instructions": "ab"}
    first = openai_client.responses.create(input=[{"role": "user", "content": "the"}], **fields)
    earlier = [{"role": "user", "content": "the"}, *[item.model_dump(exclude_unset=True) for item in first.output]]
    second = openai_client.responses.create(input=[*earlier, {"role": "user", "content": "end"}], **fields)
    messages = [
        {"role": "system", "content": "ab"},
        {"role": "user", "content": "the"},
        {"role": "assistant", "content": first.output_text},
        {"role": "user", "content": "end"},
    ]
    body = {"messages": messages, "temperature": 0, "max_tokens": 12}
    chat = client.post("/v1/chat/completions", body).json()
    assert second.output_text == chat["choices"][0]["message"]["content"]
    assert second.usage.input_tokens == chat["usage"]["prompt_tokens"]


def test_a_stream_has_all_events_in_order(openai_client: openai.OpenAI) -> None:
    fields: dict[str, Any] = {"model": MODEL, "input": "the end", "max_output_tokens": 16, "temperature": 0}
    whole = openai_client.responses.create(**fields)
    events = list(openai_client.responses.create(**fields, stream=True))
    kinds = [event.type.removeprefix("response.") for event in events]
    deltas = kinds.count("output_text.delta")
    before = ["created", "in_progress", "output_item.added", "content_part.added"]
    after = ["output_text.done", "content_part.done", "output_item.done", "incomplete"]
    assert kinds == [*before, *["output_text.delta"] * deltas, *after] and deltas > 1
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert "".join(event.delta for event in events[4 : 4 + deltas]) == whole.output_text
    assert events[-1].response.output_text == whole.output_text


def test_a_schema_is_followed(openai_client: openai.OpenAI) -> None:
    form = {"type": "json_schema", "name": "answer", "schema": SCHEMA, "strict": True}
    fields: dict[str, Any] = {"model": MODEL, "input": "ab", "text": {"format": form}, "temperature": 0}
    answer = openai_client.responses.create(**fields)
    assert answer.status == "completed" and json.loads(answer.output_text)["a"] in (1, 2)
    with openai_client.responses.stream(**fields) as stream:
        final = stream.get_final_response()
    assert final.output_text == answer.output_text and final.usage.output_tokens == answer.usage.output_tokens


def test_calls_are_those_of_a_chat_whole_and_streamed(client: Client, openai_client: openai.OpenAI) -> None:
    tools = [{"type": "function", "function": {key: TOOLS[0][key] for key in ("name", "description", "parameters")}}]
    chat = client.chat("the end", tools=tools, tool_choice="required", parallel_tool_calls=False, max_tokens=80)
    fields: dict[str, Any] = {
        **{"model": MODEL, "input": "the end", "max_output_tokens": 80, "temperature": 0},
        **{"tools": TOOLS[:1], "tool_choice": "required", "parallel_tool_calls": False},
    }
    whole = openai_client.responses.create(**fields)
    (call,) = whole.output
    made = chat["choices"][0]["message"]["tool_calls"][0]["function"]
    assert (call.type, call.name, call.arguments, call.status) == (
        *("function_call", made["name"], made["arguments"]),
        "completed",
    )
    assert whole.status == "completed" and whole.tools[0].name == "weather" and whole.tool_choice == "required"
    assert whole.usage.input_tokens == chat["usage"]["prompt_tokens"]
    events = list(openai_client.responses.create(**fields, stream=True))
    kinds = [event.type.removeprefix("response.") for event in events]
    deltas = kinds.count("function_call_arguments.delta")
    assert kinds == [
        *("created", "in_progress", "output_item.added"),
        *["function_call_arguments.delta"] * deltas,
        *("function_call_arguments.done", "output_item.done", "completed"),
    ]
    assert deltas > 1 and [event.sequence_number for event in events] == list(range(len(events)))
    assert "".join(event.delta for event in events[3 : 3 + deltas]) == events[-3].arguments == call.arguments
    added, done = events[2].item, events[-2].item
    assert (added.id, added.call_id, added.name, added.arguments) == (done.id, done.call_id, "weather", "")
    assert events[-1].response.output == [done]
    with openai_client.responses.stream(**fields) as stream:
        assert stream.get_final_response().output[0].arguments == call.arguments


def test_text_and_calls_are_items_of_their_own() -> None:
    output = Output()
    found = ["a", "b", CallBegin("f"), Arguments("{", last=False), Arguments("}", last=True), CallBegin("g")]
    events = [name for _, name, _ in [*output.add(found), *output.end("incomplete")]]
    text = ["output_item.added", "content_part.added", *["output_text.delta"] * 2, "output_text.done"]
    call = ["output_item.added", *["function_call_arguments.delta"] * 2, "function_call_arguments.done"]
    cut = ["output_item.added", "function_call_arguments.done", "output_item.done"]
    assert events == [*text, "content_part.done", "output_item.done", *call, "output_item.done", *cut]
    items = [item.model_dump(exclude_unset=True) for item in output.items()]
    assert [item["status"] for item in items] == ["completed", "completed", "incomplete"]
    assert [item["type"] for item in items] == ["message", "function_call", "function_call"]


def test_a_call_that_is_cut_is_incomplete_and_one_cut_in_its_head_is_no_item(client: Client) -> None:
    body = {"input": "the end", "tools": TOOLS[:1], "tool_choice": "required", "temperature": 0}
    for limit, kinds in ((4, []), (48, ["function_call"])):
        answer = client.post(PATH, body | {"max_output_tokens": limit}).json()
        assert answer["status"] == "incomplete" and [item["type"] for item in answer["output"]] == kinds
        assert all(item["status"] == "incomplete" for item in answer["output"])


def test_items_of_earlier_answers_are_messages() -> None:
    """As an agent sends them: with ids, states, and fields of its own."""
    items = [
        {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "b"}]},
        {"role": "user", "content": "c"},
        {"type": "reasoning", "id": "rs_1", "summary": [{"type": "summary_text", "text": "d"}], "content": None},
        {"type": "message", "id": "msg_1", "role": "assistant", "status": "completed", "content": OUTPUT_TEXT},
        {
            "type": "function_call",
            "id": "fc_1",
            "call_id": "1",
            "name": "f",
            "arguments": '{"n": 1}',
            "status": "completed",
        },
        {"type": "function_call", "call_id": "2", "name": "g", "arguments": "", "namespace": "x"},
        {"type": "function_call_output", "call_id": "1", "output": "h"},
        {"type": "function_call_output", "id": "o", "call_id": "2", "output": [{"type": "input_text", "text": "i"}]},
        {"type": "reasoning", "id": "rs_2", "summary": [], "encrypted_content": "j"},
        {"type": "function_call", "call_id": "3", "name": "g", "arguments": '{"n": '},
    ]
    body = ResponsesBody.model_validate({"input": items, "instructions": "a"})
    messages = [message.model_dump(exclude_none=True) for message in body.as_chat().messages]
    calls = [
        {"id": number, "type": "function", "function": {"name": name, "arguments": arguments}}
        for number, name, arguments in (("1", "f", {"n": 1}), ("2", "g", {}), ("3", "g", {}))
    ]
    assert messages == [
        {"role": "system", "content": "a\n\nb"},
        {"role": "user", "content": "c"},
        {"role": "assistant", "content": "e", "reasoning_content": "d", "tool_calls": calls[:2]},
        {"role": "tool", "tool_call_id": "1", "content": "h"},
        {"role": "tool", "tool_call_id": "2", "content": "i"},
        {"role": "assistant", "content": "", "tool_calls": calls[2:]},
    ]


def test_an_agent_with_six_tools_calls_them_until_it_answers(openai_client: openai.OpenAI) -> None:
    """The fields are those that Codex sends."""
    fields: dict[str, Any] = {
        **{"model": MODEL, "instructions": "ab", "parallel_tool_calls": False, "store": False, "max_output_tokens": 90},
        **{"tools": [*TOOLS, {"type": "web_search", "external_web_access": False}], "temperature": 0},
        **{"include": ["reasoning.encrypted_content"], "reasoning": {"effort": "medium", "summary": "auto"}},
        **{"prompt_cache_key": "a", "text": {"verbosity": "low"}, "extra_body": {"client_metadata": {"a": "b"}}},
    }
    items: list[dict[str, Any]] = [
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "c"}]}
    ]
    allowed = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "now"}]}
    for name, choice in (("weather", {"type": "function", "name": "weather"}), ("now", allowed)):
        with openai_client.responses.stream(input=items, tool_choice=choice, **fields) as stream:
            answer = stream.get_final_response()
        (call,) = answer.output
        assert call.name == name and len(answer.tools) == len(TOOLS)
        # The context of this model has no place for more.
        items = [items[0], call.model_dump(exclude_unset=True, exclude={"parsed_arguments"})]
        items.append({"type": "function_call_output", "call_id": call.call_id, "output": "ok"})
    final = openai_client.responses.create(input=items, tool_choice="none", **fields)
    assert [item.type for item in final.output] == ["message"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({}, "input"),
        ({"input": []}, "input"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content"),
        ({"input": "a" * 500}, "input"),
        ({"input": "a", "previous_response_id": "resp_1"}, "previous_response_id"),
        ({"input": "a", "tools": [{"type": "web_search"}]}, "tools"),
        ({"input": "a", "text": {"format": {"type": "json_schema"}}}, "text.format.schema"),
        ({"input": "a", "text": {"format": {"type": "json_schema", "schema": {"not": {}}}}}, "text.format"),
        ({"input": "a", "max_tokens": 3}, "max_tokens"),
        ({"input": "a", "max_tokens": 16}, "max_tokens"),
        ({"input": "a", "n": 2}, "n"),
        ({"input": "a", "min_tokens": 9, "max_output_tokens": 8}, "min_tokens"),
        ({"input": "a", "guided_regex": "a", "text": {"format": {"type": "json_object"}}}, "guided_regex"),
        ({"input": "a", "logit_bias": {"999": 1}}, "logit_bias"),
        ({"input": "a", "stop_token_ids": [999]}, "stop_token_ids[0]"),
        ({"input": "a", "chat_template_kwargs": {"tokenize": True}}, "chat_template_kwargs.tokenize"),
        ({"input": [{**CALL, "arguments": "{}"}], "continue_final_message": True}, "continue_final_message"),
        ({"input": "a", "tools": [TOOLS[0], {"type": "custom", "name": "f"}]}, "tools[1].type"),
        ({"input": "a", "tools": TOOLS[:1], "include": ["message.output_text.logprobs"]}, "include"),
        ({"input": "a", "top_logprobs": 2}, "top_logprobs"),
        ({"input": "a", "stream": True, "stream_options": {"continuous_usage_stats": True}}, PER_CHUNK),
        ({"input": [{"type": "item_reference", "id": "a"}]}, "input[0]"),
        ({"input": [{"type": "reasoning", "summary": []}]}, "input"),
        ({"input": [{"type": "function_call_output", "output": "a"}]}, "input[0].call_id"),
        ({"input": [{**CALL, "arguments": "[]"}]}, "input[0].arguments"),
        ({"input": "a", "tool_choice": "required"}, "tool_choice"),
        ({"input": "a", "tools": TOOLS, "tool_choice": {"type": "function", "name": "f"}}, "tool_choice.name"),
        (
            {
                **{"input": "a", "tools": TOOLS},
                "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "f"}]},
            },
            "tool_choice.tools",
        ),
        (
            {"input": "a", "tools": [{"type": "web_search"}, {**TOOLS[0], "strict": True, "parameters": {"not": {}}}]},
            "tools[1].parameters",
        ),
        ({"input": "a", "tools": [TOOLS[0], TOOLS[0]]}, "tools"),
    ],
)
def test_what_is_refused_is_named(client: Client, fields: dict[str, Any], param: str) -> None:
    error = client.refused(PATH, fields)
    assert error["param"] == param, error

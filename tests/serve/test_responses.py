"""``/v1/responses``: the same text as a chat, for the ``openai`` client too."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from support import serving
from support.serving import MODEL, Client

PATH = "/v1/responses"
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
        ({"input": "a", "text": {"format": {"type": "json_schema", "schema": {}}}}, "text.format"),
        ({"input": "a", "max_tokens": 3}, "max_tokens"),
    ],
)
def test_what_is_refused_is_named(client: Client, fields: dict[str, Any], param: str) -> None:
    error = client.refused(PATH, fields)
    assert error["param"] == param, error

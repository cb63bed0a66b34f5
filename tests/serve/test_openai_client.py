"""The ``openai`` package's own clients against a real socket."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator

import openai
import pytest
from pydantic import BaseModel, Field

from support import serving
from support.serving import MODEL, Client

MESSAGES = [{"role": "user", "content": "the end"}]
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "of a city",
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string", "maxLength": 3},
                    "days": {"type": "integer", "minimum": 0, "maximum": 9},
                },
                "required": ["city", "days"],
                "additionalProperties": False,
            },
        },
    }
]


@pytest.fixture(scope="module")
def address(client: Client) -> Iterator[str]:
    with serving.listening(client.service, lifespan="off") as address:
        yield f"{address}/v1"


@pytest.fixture(scope="module")
def openai_client(address: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=address, api_key="none", max_retries=0) as client:
        yield client


def test_models(openai_client: openai.OpenAI) -> None:
    assert [model.id for model in openai_client.models.list()] == [MODEL]
    assert openai_client.models.retrieve(MODEL).object == "model"


def test_chats_and_streams_of_the_sync_client(openai_client: openai.OpenAI) -> None:
    fields = {"model": MODEL, "messages": MESSAGES, "temperature": 0, "max_tokens": 20}
    whole = openai_client.chat.completions.create(**fields)
    assert whole.usage.completion_tokens == 20 and whole.choices[0].finish_reason == "length"
    assert whole.metrics["speculative_decoding"]["num_spec_tokens"] == 3
    chunks = list(openai_client.chat.completions.create(**fields, stream=True, stream_options={"include_usage": True}))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == (
        whole.choices[0].message.content
    )
    assert chunks[-1].usage.total_tokens == whole.usage.total_tokens
    with openai_client.chat.completions.stream(**fields) as stream:
        for _ in stream:
            pass
        assert stream.current_completion_snapshot.choices[0].message.content == whole.choices[0].message.content


def test_the_async_client(address: str, openai_client: openai.OpenAI) -> None:
    fields = {"model": MODEL, "prompt": "the end", "temperature": 0, "max_tokens": 20, "echo": True}

    async def ask() -> tuple[str, str]:
        async with openai.AsyncOpenAI(base_url=address, api_key="none", max_retries=0) as client:
            whole = await client.completions.create(**fields)
            text = ""
            async for chunk in await client.completions.create(**fields, stream=True):
                text += chunk.choices[0].text
            return whole.choices[0].text, text

    whole, streamed = asyncio.run(ask())
    assert whole == streamed == openai_client.completions.create(**fields).choices[0].text
    assert whole.startswith("the end")


def test_three_choices_with_logprobs(openai_client: openai.OpenAI) -> None:
    answer = openai_client.chat.completions.create(
        model=MODEL, messages=MESSAGES, n=3, seed=1, max_tokens=6, logprobs=True, top_logprobs=2
    )
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    for choice in answer.choices:
        assert len(choice.logprobs.content) <= 6
        assert all(len(entry.top_logprobs) == 2 and entry.logprob <= 0 for entry in choice.logprobs.content)
    legacy = openai_client.completions.create(model=MODEL, prompt=[1, 2, 3], logprobs=2, max_tokens=3, temperature=0)
    assert len(legacy.choices[0].logprobs.token_logprobs) == 3


def test_structured_outputs(openai_client: openai.OpenAI) -> None:
    class Answer(BaseModel):
        name: str = Field(max_length=4)
        good: bool

    parsed = openai_client.chat.completions.parse(
        model=MODEL, messages=MESSAGES, response_format=Answer, max_tokens=100, temperature=0
    )
    answer = parsed.choices[0].message.parsed
    assert isinstance(answer, Answer) and parsed.choices[0].finish_reason == "stop"
    pattern = {"guided_regex": "[ab]{3}(?:yes|no)"}
    text = openai_client.completions.create(model=MODEL, prompt="ab", max_tokens=20, extra_body=pattern).choices[0].text
    assert text[3:] in ("yes", "no") and set(text[:3]) <= set("ab")


def test_tools(openai_client: openai.OpenAI) -> None:
    fields = {"model": MODEL, "messages": MESSAGES, "tools": TOOLS, "temperature": 0, "max_tokens": 150}
    for choice in ("required", {"type": "function", "function": {"name": "weather"}}):
        answer = openai_client.chat.completions.create(**fields, tool_choice=choice, parallel_tool_calls=False).choices[
            0
        ]
        assert answer.finish_reason == "tool_calls" and answer.message.content is None
        (call,) = answer.message.tool_calls
        arguments = json.loads(call.function.arguments)
        assert call.function.name == "weather" and set(arguments) == {"city", "days"}
        assert call.id.startswith("call_") and call.type == "function"
    messages = [
        *MESSAGES,
        answer.message.to_dict(),
        {"role": "tool", "tool_call_id": call.id, "content": "ab"},
    ]
    again = openai_client.chat.completions.create(model=MODEL, messages=messages, max_tokens=3)
    assert again.usage.completion_tokens <= 3


def test_streamed_tools(openai_client: openai.OpenAI) -> None:
    fields = {"model": MODEL, "messages": MESSAGES, "tools": TOOLS, "temperature": 0, "max_tokens": 150}
    fields |= {"tool_choice": "required", "parallel_tool_calls": False}
    whole = openai_client.chat.completions.create(**fields).choices[0].message.tool_calls[0].function
    with openai_client.chat.completions.stream(**fields) as stream:
        final = stream.get_final_completion().choices[0]
    assert final.finish_reason == "tool_calls"
    assert final.message.tool_calls[0].function.arguments == whole.arguments


def test_errors_have_the_clients_classes(openai_client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        openai_client.completions.create(model=MODEL, prompt="ab", best_of=2)
    assert caught.value.param == "best_of" and caught.value.code == "unsupported_field"
    with pytest.raises(openai.NotFoundError):
        openai_client.completions.create(model="other", prompt="ab")

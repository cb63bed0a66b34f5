"""Client libraries with their defaults against ``speccompile serve smollm2``.

They need an environment of their own: `make test-clients`. ``SERVER_PYTHON`` is the interpreter of the server.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from typing import Any, Literal

import openai
import pytest
from pydantic import BaseModel

SECONDS_TO_START = 240
MODEL = "smollm2"
QUESTION = "Which city is meant?"


class City(BaseModel):
    name: Literal["Bern", "Oslo"]
    capital: bool


TOOLS = {
    "read_file": {"path": {"type": "string", "enum": ["a.py", "b.py"]}},
    "write_file": {"path": {"type": "string", "enum": ["a.py"]}, "text": {"type": "string", "enum": ["pass"]}},
    "list_files": {"folder": {"type": "string", "enum": [".", "src"]}},
    "run_tests": {"verbose": {"type": "boolean"}},
    "search": {"word": {"type": "string", "enum": ["def"]}, "most": {"type": "integer", "enum": [1, 2]}},
    "finish": {"done": {"type": "boolean"}},
}


def schema(name: str) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": TOOLS[name],
        "required": list(TOOLS[name]),
        "additionalProperties": False,
    }


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [os.environ["SERVER_PYTHON"], "-m", "speccompile", "serve", MODEL, "--port", str(port)]
    with subprocess.Popen(command) as server:
        try:
            address = f"http://127.0.0.1:{port}"
            wait_for(f"{address}/health", server)
            yield f"{address}/v1"
        finally:
            server.terminate()


def wait_for(address: str, server: subprocess.Popen[bytes]) -> None:
    until = time.monotonic() + SECONDS_TO_START
    while True:
        assert server.poll() is None and time.monotonic() < until
        try:
            urllib.request.urlopen(address).close()
            return
        except OSError:
            time.sleep(0.2)


@pytest.fixture(scope="module")
def client(url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=url, api_key="none", max_retries=0)


def ask(text: str = QUESTION) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def test_openai_chat_completions_and_responses(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model=MODEL, messages=ask(), max_tokens=8, seed=0)
    pieces = client.chat.completions.create(model=MODEL, messages=ask(), max_tokens=8, seed=0, stream=True)
    text = "".join(piece.choices[0].delta.content or "" for piece in pieces if piece.choices)
    assert text == answer.choices[0].message.content
    assert client.completions.create(model=MODEL, prompt="a", max_tokens=4).usage.completion_tokens == 4
    assert client.responses.create(model=MODEL, input=QUESTION, max_output_tokens=16).output_text
    parsed = client.chat.completions.parse(model=MODEL, messages=ask(), response_format=City)
    assert isinstance(parsed.choices[0].message.parsed, City)
    assert isinstance(client.responses.parse(model=MODEL, input=QUESTION, text_format=City).output_parsed, City)


def test_an_agent_loop_with_six_tools_over_chat(client: openai.OpenAI) -> None:
    tools = [{"type": "function", "function": {"name": name, "parameters": schema(name)}} for name in TOOLS]
    messages: list[Any] = [{"role": "system", "content": "You mend programs."}, *ask("Mend a.py.")]
    for turn in range(6):
        answer = client.chat.completions.create(model=MODEL, messages=messages, tools=tools, tool_choice="required")
        message = answer.choices[0].message
        assert answer.choices[0].finish_reason == "tool_calls" and message.tool_calls
        messages.append(message.model_dump())
        for call in message.tool_calls:
            assert set(json.loads(call.function.arguments)) == set(TOOLS[call.function.name])
            messages.append({"role": "tool", "tool_call_id": call.id, "content": f"turn {turn}"})
    last = client.chat.completions.create(model=MODEL, messages=messages, tools=tools, max_tokens=8)
    assert last.usage is not None and last.usage.prompt_tokens > 100


def test_an_agent_loop_with_six_tools_over_responses(client: openai.OpenAI) -> None:
    tools: Any = [{"type": "function", "name": name, "parameters": schema(name), "strict": True} for name in TOOLS]
    items: list[Any] = ask("Mend a.py.")
    for turn in range(6):
        events = client.responses.create(
            model=MODEL, instructions="You mend programs.", input=items, tools=tools, tool_choice="required",
            parallel_tool_calls=False, store=False, include=["reasoning.encrypted_content"], stream=True,
        )  # fmt: skip
        (done,) = [event for event in events if event.type == "response.completed"]
        calls = [item for item in done.response.output if item.type == "function_call"]
        assert calls
        items += [item.model_dump(exclude_none=True) for item in done.response.output]
        for call in calls:
            assert set(json.loads(call.arguments)) == set(TOOLS[call.name])
            items.append({"type": "function_call_output", "call_id": call.call_id, "output": f"turn {turn}"})
    last = client.responses.create(model=MODEL, input=items, tools=tools, max_output_tokens=16)
    assert last.usage is not None and last.usage.input_tokens > 100


def test_litellm(url: str) -> None:
    import litellm

    options: dict[str, Any] = {"model": f"openai/{MODEL}", "api_base": url, "api_key": "none"}
    assert litellm.completion(messages=ask(), max_tokens=8, **options).choices[0].message.content
    pieces = litellm.completion(messages=ask(), max_tokens=8, stream=True, **options)
    assert "".join(piece.choices[0].delta.content or "" for piece in pieces)
    answer = litellm.completion(messages=ask(), response_format=City, **options)
    City.model_validate_json(answer.choices[0].message.content)


def test_langchain(url: str) -> None:
    from langchain_openai import ChatOpenAI

    chat = ChatOpenAI(model=MODEL, base_url=url, api_key="none")
    assert chat.invoke(QUESTION, max_tokens=8).content
    assert "".join(str(piece.content) for piece in chat.stream(QUESTION, max_tokens=8))
    assert isinstance(chat.with_structured_output(City).invoke(QUESTION), City)
    calls = chat.bind_tools([City], tool_choice="City").invoke(QUESTION).tool_calls
    City.model_validate(calls[0]["args"])


def test_llama_index(url: str) -> None:
    from llama_index.core.llms import ChatMessage
    from llama_index.llms.openai_like import OpenAILike

    chat = OpenAILike(model=MODEL, api_base=url, api_key="none", is_chat_model=True, max_tokens=8)
    assert chat.chat([ChatMessage(role="user", content=QUESTION)]).message.content
    assert "".join(piece.delta or "" for piece in chat.stream_chat([ChatMessage(role="user", content=QUESTION)]))
    plain = OpenAILike(model=MODEL, api_base=url, api_key="none", max_tokens=8)
    assert plain.complete("a").text


def test_instructor(url: str) -> None:
    import instructor

    patched = instructor.from_openai(openai.OpenAI(base_url=url, api_key="none"))
    assert isinstance(patched.chat.completions.create(model=MODEL, messages=ask(), response_model=City), City)


def test_pydantic_ai(url: str) -> None:
    from pydantic_ai import Agent
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    model = OpenAIChatModel(MODEL, provider=OpenAIProvider(base_url=url, api_key="none"))
    assert isinstance(Agent(model, output_type=City).run_sync(QUESTION).output, City)

    async def streamed() -> list[str]:
        async with Agent(model, model_settings={"max_tokens": 8}).run_stream(QUESTION) as result:
            return [text async for text in result.stream_text(delta=True)]

    assert "".join(asyncio.run(streamed()))


def test_dspy(url: str) -> None:
    import dspy

    lm = dspy.LM(f"openai/{MODEL}", api_base=url, api_key="none", cache=False)
    assert lm(QUESTION, max_tokens=8)
    # dspy asks only models that it knows for JSON.
    fields = {"type": "object", "properties": {"capital": {"type": "boolean"}}, "required": ["capital"]}
    form = {"type": "json_schema", "json_schema": {"name": "answer", "schema": fields}}
    with dspy.context(lm=lm, adapter=dspy.JSONAdapter()):
        answer = dspy.Predict("question -> capital: bool", response_format=form)(question=QUESTION)
    assert answer.capital in (True, False)

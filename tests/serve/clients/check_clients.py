"""Client libraries with their defaults against ``speccompile serve smollm2``.

They need an environment of their own: `make test-clients`. Annotations are not postponed, since libraries read those of
functions.
"""

import asyncio
import enum
import json
from typing import Any, Literal

import openai
import pytest
from pydantic import BaseModel, Field

from support.served_model import MODEL

QUESTION = "Which city is meant?"


class Size(enum.Enum):
    TOWN = "town"
    CITY = "city"


class City(BaseModel):
    name: Literal["Bern", "Oslo"]
    capital: bool


class Place(BaseModel):
    name: Literal["Bern", "Oslo"]
    size: Size


class Trip(BaseModel):
    """References, an enumeration, a nested model that may be null, and a list."""

    start: Place
    end: Place | None = None
    days: Literal[1, 2, 3]
    tags: list[Literal["rain", "sun"]] = Field(max_length=2)


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


def test_openai_parses_nested_models(client: openai.OpenAI) -> None:
    parsed = client.chat.completions.parse(model=MODEL, messages=ask(), response_format=Trip)
    assert isinstance(parsed.choices[0].message.parsed, Trip)
    assert isinstance(client.responses.parse(model=MODEL, input=QUESTION, text_format=Trip).output_parsed, Trip)
    with client.chat.completions.stream(model=MODEL, messages=ask(), response_format=City) as pieces:
        assert isinstance(pieces.get_final_completion().choices[0].message.parsed, City)
    with client.responses.stream(model=MODEL, input=QUESTION, text_format=City) as events:
        assert isinstance(events.get_final_response().output_parsed, City)


def test_openai_streams_calls_of_nested_models(client: openai.OpenAI) -> None:
    tools = [openai.pydantic_function_tool(Trip)]
    options: Any = {"model": MODEL, "tools": tools, "tool_choice": "required"}
    with client.chat.completions.stream(messages=ask(), **options) as pieces:
        kinds = {piece.type for piece in pieces}
        (call,) = pieces.get_final_completion().choices[0].message.tool_calls or []
    assert "tool_calls.function.arguments.delta" in kinds and isinstance(call.function.parsed_arguments, Trip)
    with client.responses.stream(input=QUESTION, **options) as events:
        calls = [item for item in events.get_final_response().output if item.type == "function_call"]
    assert [type(call.parsed_arguments) for call in calls] == [Trip]


def test_openai_async(url: str) -> None:
    async def texts() -> list[str]:
        async with openai.AsyncOpenAI(base_url=url, api_key="none") as client:
            options: Any = {"model": MODEL, "messages": ask(), "max_tokens": 8, "temperature": 0}
            answers = await asyncio.gather(*(client.chat.completions.create(**options) for _ in range(6)))
            pieces = await client.chat.completions.create(**options, stream=True)
            streamed = [piece.choices[0].delta.content or "" async for piece in pieces if piece.choices]
            return [*(answer.choices[0].message.content or "" for answer in answers), "".join(streamed)]

    assert len(set(asyncio.run(texts()))) == 1


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


def test_litellm(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # Prices, which it would download.
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")
    import litellm

    options: dict[str, Any] = {"model": f"openai/{MODEL}", "api_base": url, "api_key": "none"}
    assert litellm.completion(messages=ask(), max_tokens=8, **options).choices[0].message.content
    pieces = litellm.completion(messages=ask(), max_tokens=8, stream=True, **options)
    assert "".join(piece.choices[0].delta.content or "" for piece in pieces)
    answer = litellm.completion(messages=ask(), response_format=Trip, **options)
    Trip.model_validate_json(answer.choices[0].message.content)
    tool = {"type": "function", "function": {"name": "search", "parameters": schema("search")}}
    pieces = litellm.completion(messages=ask(), tools=[tool], tool_choice="required", stream=True, **options)
    (call,) = litellm.stream_chunk_builder(list(pieces)).choices[0].message.tool_calls
    assert set(json.loads(call.function.arguments)) == set(TOOLS["search"])
    assert asyncio.run(litellm.acompletion(messages=ask(), max_tokens=8, num_retries=2, **options)).choices
    assert litellm.responses(input=QUESTION, max_output_tokens=16, **options).output
    assert litellm.text_completion(prompt="a", max_tokens=4, **options).usage.completion_tokens == 4


@pytest.mark.parametrize("use_responses_api", [False, True])
def test_langchain(url: str, use_responses_api: bool) -> None:
    from langchain_core.messages import HumanMessage
    from langchain_core.tools import tool
    from langchain_openai import ChatOpenAI

    @tool
    def weather(place: Place, days: Literal[1, 2] | None = None) -> str:
        """The weather of a place."""
        return f"rain in {place.name}"

    chat = ChatOpenAI(model=MODEL, base_url=url, api_key="none", use_responses_api=use_responses_api)
    assert chat.invoke(QUESTION, max_tokens=16).content
    assert "".join(str(piece.text) for piece in chat.stream(QUESTION, max_tokens=16))
    assert isinstance(chat.with_structured_output(Trip).invoke(QUESTION), Trip)
    assert isinstance(chat.with_structured_output(City, method="function_calling").invoke(QUESTION), City)
    bound, messages = chat.bind_tools([weather], tool_choice="any"), [HumanMessage(QUESTION)]
    for _ in range(2):
        messages.append(bound.invoke(messages))
        messages += [weather.invoke(call) for call in messages[-1].tool_calls]
    assert [message.type for message in messages] == ["human", "ai", "tool", "ai", "tool"]
    assert "rain in" in messages[-1].content
    assert len(asyncio.run(chat.abatch([QUESTION, "a"], max_tokens=16))) == 2


def test_llama_index(url: str) -> None:
    from llama_index.core.llms import ChatMessage
    from llama_index.core.prompts import PromptTemplate
    from llama_index.core.tools import FunctionTool
    from llama_index.llms.openai_like import OpenAILike

    def weather(name: Literal["Bern", "Oslo"]) -> str:
        """The weather of a city."""
        return name

    question = [ChatMessage(role="user", content=QUESTION)]
    chat = OpenAILike(model=MODEL, api_base=url, api_key="none", is_chat_model=True, max_tokens=8)
    assert chat.chat(question).message.content
    assert "".join(piece.delta or "" for piece in chat.stream_chat(question))
    assert asyncio.run(chat.achat(question)).message.content
    plain = OpenAILike(model=MODEL, api_base=url, api_key="none", max_tokens=8)
    assert plain.complete("a").text
    options: dict[str, Any] = {"is_chat_model": True, "is_function_calling_model": True}
    calling = OpenAILike(model=MODEL, api_base=url, api_key="none", **options)
    tools = [FunctionTool.from_defaults(weather)]
    answer = calling.chat_with_tools(tools, user_msg=QUESTION, tool_required=True)
    assert [call.tool_name for call in calling.get_tool_calls_from_response(answer)] == ["weather"]
    assert isinstance(calling.structured_predict(Trip, PromptTemplate(QUESTION)), Trip)


def test_instructor(url: str) -> None:
    import instructor

    for mode in (instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA):
        patched = instructor.from_openai(openai.OpenAI(base_url=url, api_key="none"), mode=mode)
        assert isinstance(patched.chat.completions.create(model=MODEL, messages=ask(), response_model=Trip), Trip)
        # Of an unfinished model instructor accepts no enumerations.
        parts = patched.chat.completions.create_partial(model=MODEL, messages=ask(), response_model=City)
        assert list(parts)[-1].capital in (True, False)


def test_pydantic_ai(url: str) -> None:
    from pydantic_ai import Agent, NativeOutput
    from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
    from pydantic_ai.providers.openai import OpenAIProvider

    provider = OpenAIProvider(base_url=url, api_key="none")
    for model in (OpenAIChatModel(MODEL, provider=provider), OpenAIResponsesModel(MODEL, provider=provider)):
        assert isinstance(Agent(model, output_type=Trip).run_sync(QUESTION).output, Trip)
        assert isinstance(Agent(model, output_type=NativeOutput(City)).run_sync(QUESTION).output, City)
        assert "".join(asyncio.run(_streamed(Agent(model, model_settings={"max_tokens": 16}))))


async def _streamed(agent: Any) -> list[str]:
    async with agent.run_stream(QUESTION) as result:
        return [text async for text in result.stream_text(delta=True)]


def test_dspy(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")
    import dspy

    lm = dspy.LM(f"openai/{MODEL}", api_base=url, api_key="none", cache=False)
    assert lm(QUESTION, max_tokens=8)
    # dspy asks only models that it knows for JSON.
    fields = {"type": "object", "properties": {"capital": {"type": "boolean"}}, "required": ["capital"]}
    form = {"type": "json_schema", "json_schema": {"name": "answer", "schema": fields}}
    with dspy.context(lm=lm, adapter=dspy.JSONAdapter()):
        answer = dspy.Predict("question -> capital: bool", response_format=form)(question=QUESTION)
    assert answer.capital in (True, False)

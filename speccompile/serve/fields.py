"""The fields of requests: those of the OpenAI API that the engine can follow, and vLLM's extra names."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from speccompile.serve.base_fields import Fields, wrong
from speccompile.serve.tool_fields import AnyToolChoice, Tool

MOST_STOPS = 16
MOST_STOP_CHARACTERS = 512
MOST_BIAS = 100
#: As in the OpenAI API, which has 5 for completions and 20 for chats.
MOST_TOP_LOGPROBS = 20


def _stops(value: Any) -> Any:
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list) or not all(isinstance(text, str) and text for text in texts):
        raise ValueError("it has to be a text that is not empty, or a list of such texts")
    if len(texts) > MOST_STOPS or any(len(text) > MOST_STOP_CHARACTERS for text in texts):
        raise ValueError(f"at most {MOST_STOPS} texts of at most {MOST_STOP_CHARACTERS} characters")
    return texts


def _bias(value: Any) -> Any:
    """JSON has texts as names."""
    if not isinstance(value, dict) or not all(name.isascii() and name.isdecimal() for name in value):
        raise ValueError("it has to map token ids to numbers")
    # Of many wrong values the first one is reported.
    bad = next((item for item in value.items() if not _is_bias(item[1])), None)
    return {int(name): bias for name, bias in (value.items() if bad is None else [bad])}


_Bias = Annotated[float, Field(ge=-MOST_BIAS, le=MOST_BIAS)]


def _is_bias(value: Any) -> bool:
    return type(value) in (int, float) and -MOST_BIAS <= value <= MOST_BIAS


def _prompt(value: Any) -> Any:
    """One or several prompts, texts or token ids, as a list of prompts."""
    is_ids = isinstance(value, list) and bool(value) and all(type(item) is int for item in value)
    prompts = [value] if isinstance(value, str) or is_ids else value
    wrong = "it has to be a text, a list of token ids, or a list of texts or of lists of token ids"
    if not isinstance(prompts, list) or not prompts:
        raise ValueError(wrong)
    for prompt in prompts:
        if not isinstance(prompt, str) and not (
            isinstance(prompt, list) and prompt and all(type(item) is int for item in prompt)
        ):
            raise ValueError(wrong)
    return prompts


class StreamOptions(Fields):
    """``stream_options`` of completions and chats."""

    include_usage: bool = False
    include_obfuscation: Literal[False] = False
    # vLLM's name: each chunk has the usage up to it.
    continuous_usage_stats: bool = False


class JsonSchema(Fields):
    """``json_schema`` of a response format."""

    name: str
    schema_: dict[str, Any] = Field(alias="schema")
    description: str | None = None
    strict: bool | None = None


class ResponseFormat(Fields):
    """``json_schema``, ``json_object``, ``text``, or ``grammar``, whose fields are those of the API's custom tools."""

    type: Literal["text", "json_object", "json_schema", "grammar"]
    json_schema: JsonSchema | None = None
    syntax: Literal["regex"] | None = None
    definition: str | None = Field(default=None, min_length=1)

    @model_validator(mode="after")
    def _fits_type(self) -> ResponseFormat:
        for name, kind in (("json_schema", "json_schema"), ("syntax", "grammar"), ("definition", "grammar")):
            if (self.type == kind) != (getattr(self, name) is not None):
                raise wrong(name, f"it must be given with type {kind}, and with no other")
        return self


class StructuredOutputs(Fields):
    """vLLM's name for what a text follows; exactly one of its fields."""

    json_: dict[str, Any] | str | None = Field(None, alias="json")
    regex: str | None = Field(None, min_length=1)
    choice: list[Annotated[str, Field(min_length=1)]] | None = Field(None, min_length=1)
    json_object: Literal[True] | None = None

    @model_validator(mode="after")
    def _is_one(self) -> StructuredOutputs:
        if len(self.model_fields_set) != 1:
            raise ValueError("exactly one of json, regex, choice and json_object must be given")
        return self


def _text_of(value: Any) -> Any:
    """A text, also where it is given in parts."""
    if value is None or isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise ValueError("it has to be a text, or a list of parts of type text")
    for part in value:
        is_text = isinstance(part, dict) and part.keys() == {"type", "text"} and part["type"] == "text"
        if not is_text or not isinstance(part["text"], str):
            raise ValueError('a part has to be {"type": "text", "text": ...}, since the model reads text alone')
    return "".join(part["text"] for part in value)


class Prediction(Fields):
    """The text that the answer is expected to have."""

    type: Literal["content"]
    content: Annotated[str, BeforeValidator(_text_of)]


class Generation(Fields):
    """What completions and chats share."""

    model: str | None = None
    n: int = Field(1, ge=1, le=128)
    max_tokens: int | None = Field(None, ge=1)
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    stop: Annotated[list[str], BeforeValidator(_stops)] = Field(default_factory=list)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    logit_bias: Annotated[dict[int, _Bias] | None, BeforeValidator(_bias)] = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    user: str | None = Field(None, max_length=256)
    prediction: Prediction | None = None
    # vLLM's names.
    top_k: int | None = Field(None, ge=-1)
    min_p: float | None = Field(None, ge=0, le=1)
    repetition_penalty: float | None = Field(None, gt=0, le=100)
    min_tokens: int | None = Field(None, ge=0)
    ignore_eos: bool = False
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = Field(None, min_length=1)
    structured_outputs: StructuredOutputs | None = None
    response_format: ResponseFormat | None = None
    priority: int = Field(0, gt=-(2**63), lt=2**63)
    # The engine's names.
    num_draft_tokens: int | None = Field(None, ge=0)
    return_token_sources: bool = False

    @model_validator(mode="after")
    def _fields_agree(self) -> Generation:
        names = ("guided_json", "guided_regex", "structured_outputs")
        given = [name for name in names if getattr(self, name) is not None]
        if self.response_format is not None and self.response_format.type != "text":
            given.append("response_format")
        if len(given) > 1:
            raise wrong(given[0], f"{' and '.join(given)} cannot be followed together")
        if self.stream_options is not None and not self.stream:
            raise wrong("stream_options", "it needs stream=true")
        most = getattr(self, "max_completion_tokens", None) or self.max_tokens
        if self.min_tokens is not None and most is not None and self.min_tokens > most:
            raise wrong("min_tokens", f"it must be at most max_tokens, which is {most}")
        return self


class CompletionBody(Generation):
    """Of ``/v1/completions``."""

    prompt: Annotated[list[str | list[int]], BeforeValidator(_prompt)]
    # The OpenAI API's default. Without a new token a prompt is scored alone.
    max_tokens: int | None = Field(16, ge=0)
    echo: bool = False
    logprobs: int | None = Field(None, ge=0, le=MOST_TOP_LOGPROBS)
    add_special_tokens: bool = True

    @model_validator(mode="after")
    def _echo_agrees(self) -> CompletionBody:
        if self.echo and (self.logprobs or 0) > 1:
            raise wrong("logprobs", "with echo at most the likeliest token of each place is known; use 0 or 1")
        if self.max_tokens == 0 and not self.echo:
            raise wrong("max_tokens", "0 needs echo=true")
        return self


Content = Annotated[str | None, BeforeValidator(_text_of)]


def _arguments(value: str) -> str:
    try:
        parsed = json.loads(value)
    except (ValueError, RecursionError):
        parsed = None
    if not isinstance(parsed, dict):
        raise ValueError("it has to be the JSON text of an object")
    return value


class CalledFunction(Fields):
    """The function of a tool call in a message."""

    name: str
    arguments: Annotated[str, AfterValidator(_arguments)]


class ToolCall(Fields):
    """A call that the model made earlier in the conversation."""

    id: str
    function: CalledFunction
    type: Literal["function"] = "function"


class Message(Fields):
    """A message of a chat."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Content = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    # An assistant's message as this server, or the API, has answered it.
    refusal: None = None
    annotations: list[Any] | None = Field(default=None, max_length=0)
    reasoning_content: str | None = None

    @model_validator(mode="after")
    def _fits_role(self) -> Message:
        if self.content is None and not (self.role == "assistant" and self.tool_calls):
            raise wrong("content", "it is missing")
        if self.tool_calls is not None and self.role != "assistant":
            raise wrong("tool_calls", "only an assistant's message has them")
        if (self.tool_call_id is not None) != (self.role == "tool"):
            raise wrong("tool_call_id", "it has to be given with role tool, and with no other")
        return self


class ChatBody(Generation):
    """Of ``/v1/chat/completions``."""

    messages: list[Message] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool = False
    top_logprobs: int | None = Field(None, ge=0, le=MOST_TOP_LOGPROBS)
    tools: list[Tool] | None = None
    tool_choice: AnyToolChoice | None = None
    parallel_tool_calls: bool = True
    add_generation_prompt: bool = True

    @model_validator(mode="after")
    def _chat_agrees(self) -> ChatBody:
        if self.top_logprobs is not None and not self.logprobs:
            raise wrong("top_logprobs", "it needs logprobs=true")
        if self.max_tokens is not None and self.max_completion_tokens is not None:
            raise wrong("max_tokens", "give it or max_completion_tokens, not both")
        if self.tool_choice not in (None, "none") and not self.tools:
            raise wrong("tool_choice", "it needs tools")
        return self


class TokenizeBody(Fields):
    """Of ``/tokenize``, as vLLM has it."""

    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = None
    tools: list[Tool] | None = None
    add_special_tokens: bool = True
    add_generation_prompt: bool = True
    return_token_strs: bool = False

    @model_validator(mode="after")
    def _one_input(self) -> TokenizeBody:
        if (self.prompt is None) == (self.messages is None):
            raise wrong("prompt", "give it or messages")
        if self.messages is None:
            for name in ("tools", "add_generation_prompt"):
                if name in self.model_fields_set:
                    raise wrong(name, "it needs messages")
        elif "add_special_tokens" in self.model_fields_set and self.add_special_tokens:
            raise wrong("add_special_tokens", "the chat template writes them; it needs prompt")
        return self

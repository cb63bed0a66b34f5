"""The fields of requests: those of the OpenAI API that the engine can follow, and vLLM's extra names."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from speccompile.serve.base_fields import Fields, TokenLimit, Whole, wrong
from speccompile.serve.ignored import log_ignored
from speccompile.serve.message_fields import Content, Message
from speccompile.serve.template_fields import TemplateFields
from speccompile.serve.tool_fields import AnyToolChoice, Tool

#: Stop strings of a request, and their characters together: each new piece of text is compared with all of them.
MOST_STOPS, MOST_STOP_CHARACTERS = 128, 8192
MOST_BIAS = 100
#: As in the OpenAI API, which has 5 for completions and 20 for chats.
MOST_TOP_LOGPROBS = 20


def _stops(value: Any) -> Any:
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise ValueError("it has to be a text, or a list of texts")
    # Clients send an empty text for none.
    texts = list(dict.fromkeys(filter(None, texts)))
    if len(texts) > MOST_STOPS or sum(map(len, texts)) > MOST_STOP_CHARACTERS:
        raise ValueError(f"at most {MOST_STOPS} texts, of at most {MOST_STOP_CHARACTERS} characters together")
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


class Prediction(Fields):
    """The text that the answer is expected to have."""

    type: Literal["content"]
    content: Content


class Generation(Fields):
    """What completions and chats share."""

    model: str | None = None
    n: Whole = Field(1, ge=1, le=128)
    max_tokens: TokenLimit = Field(None, ge=1)
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, ge=0, le=1)
    seed: Whole | None = None
    stop: Annotated[list[str], BeforeValidator(_stops)] = Field(default_factory=list)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    logit_bias: Annotated[dict[int, _Bias] | None, BeforeValidator(_bias)] = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    user: str | None = Field(None, max_length=256)
    # The API's newer name of the user.
    safety_identifier: str | None = Field(None, max_length=256)
    prediction: Prediction | None = None
    # vLLM's names.
    top_k: Whole | None = Field(None, ge=-1)
    min_p: float | None = Field(None, ge=0, le=1)
    repetition_penalty: float | None = Field(None, gt=0, le=100)
    # transformers' name.
    typical_p: float | None = Field(None, gt=0, le=1)
    min_tokens: Whole | None = Field(None, ge=0)
    ignore_eos: bool = False
    stop_token_ids: list[Whole] = Field(default_factory=list, max_length=64)
    skip_special_tokens: bool = True
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = Field(None, min_length=1)
    structured_outputs: StructuredOutputs | None = None
    response_format: ResponseFormat | None = None
    priority: Whole = Field(0, gt=-(2**63))
    # The engine's names.
    num_draft_tokens: Whole | None = Field(None, ge=0)
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
            log_ignored("stream_options", "the answer is no stream")
        most = getattr(self, "max_completion_tokens", None) or self.max_tokens
        if self.min_tokens is not None and most is not None and self.min_tokens > most:
            raise wrong("min_tokens", f"it must be at most max_tokens, which is {most}")
        return self


class CompletionBody(Generation):
    """Of ``/v1/completions``."""

    prompt: Annotated[list[str | list[int]], BeforeValidator(_prompt)]
    # The OpenAI API's default. Without a new token a prompt is scored alone.
    max_tokens: TokenLimit = Field(16, ge=0)
    suffix: str = ""
    echo: bool = False
    logprobs: Whole | None = Field(None, ge=0, le=MOST_TOP_LOGPROBS)
    add_special_tokens: bool = True

    @model_validator(mode="after")
    def _completion_agrees(self) -> CompletionBody:
        if self.suffix and self.echo:
            raise wrong("suffix", "it cannot be followed together with echo")
        if self.suffix and not all(isinstance(prompt, str) for prompt in self.prompt):
            raise wrong("suffix", "it needs prompts that are texts")
        if self.max_tokens == 0 and not self.echo:
            raise wrong("max_tokens", "0 needs echo=true")
        return self


class ChatBody(Generation, TemplateFields):
    """Of ``/v1/chat/completions``."""

    messages: list[Message] = Field(min_length=1)
    max_completion_tokens: TokenLimit = Field(None, ge=1)
    logprobs: bool = False
    top_logprobs: Whole | None = Field(None, ge=0, le=MOST_TOP_LOGPROBS)
    tools: list[Tool] | None = None
    tool_choice: AnyToolChoice | None = None
    parallel_tool_calls: bool = True

    @model_validator(mode="after")
    def _chat_agrees(self) -> ChatBody:
        self.check_continued(self.messages[-1].role, calls=bool(self.messages[-1].tool_calls))
        if self.top_logprobs and not self.logprobs:
            raise wrong("top_logprobs", "it needs logprobs=true")
        limits = {self.max_tokens, self.max_completion_tokens} - {None}
        if len(limits) > 1:
            raise wrong("max_tokens", "give it or max_completion_tokens, not both")
        if self.tool_choice not in (None, "none", "auto") and not self.tools:
            raise wrong("tool_choice", "it needs tools")
        return self

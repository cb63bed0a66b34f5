"""Fields of completions and chats."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, model_validator

from speccompile.serve.base_fields import Fields, TokenLimit, Whole, whole_items, wrong
from speccompile.serve.message_fields import Message
from speccompile.serve.sampling_fields import SamplingFields, StreamOptions
from speccompile.serve.template_fields import TemplateFields
from speccompile.serve.tool_fields import AnyToolChoice, Tool

#: Limit of the OpenAI API: 5 for completions and 20 for chats. Here 20 for both.
MOST_TOP_LOGPROBS = 20


def _prompt(value: Any) -> Any:
    """Convert one or several prompts (texts or token ids) to a list of prompts."""
    value = whole_items(value)
    prompts = [value] if isinstance(value, str) or _is_ids(value) else value
    wrong = "it must be a text, a list of token ids, or a list of texts or of lists of token ids"
    if not isinstance(prompts, list) or not prompts:
        raise ValueError(wrong)
    prompts = [whole_items(prompt) for prompt in prompts]
    if not all(isinstance(prompt, str) or _is_ids(prompt) for prompt in prompts):
        raise ValueError(wrong)
    return prompts


def _is_ids(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(type(item) is int for item in value)


class ChunkOptions(StreamOptions):
    """``stream_options`` of completions and chats."""

    # Of vLLM: each chunk has the usage so far.
    continuous_usage_stats: bool = False


class JsonSchema(Fields):
    """``json_schema`` of a response format."""

    name: str
    schema_: dict[str, Any] = Field(alias="schema")
    description: str | None = None
    strict: bool | None = None


class TaggedStructure(Fields):
    """A structure of vLLM's ``structural_tag``: JSON of a schema between two texts."""

    begin: str = Field(min_length=1)
    schema_: dict[str, Any] = Field(alias="schema")
    end: str


class ResponseFormat(Fields):
    """A format: ``json_schema``, ``json_object``, ``text``, ``grammar`` with the fields of the API's custom tools, or
    vLLM's ``structural_tag``."""

    type: Literal["text", "json_object", "json_schema", "grammar", "structural_tag"]
    structures: list[TaggedStructure] | None = Field(default=None, min_length=1, max_length=128)
    triggers: list[Annotated[str, Field(min_length=1)]] | None = Field(default=None, min_length=1, max_length=128)
    json_schema: JsonSchema | None = None
    syntax: Literal["regex", "lark"] | None = None
    definition: str | None = Field(default=None, min_length=1)

    @model_validator(mode="after")
    def _fits_type(self) -> ResponseFormat:
        for name, kind in (
            ("json_schema", "json_schema"),
            ("syntax", "grammar"),
            ("definition", "grammar"),
            ("structures", "structural_tag"),
            ("triggers", "structural_tag"),
        ):
            if (self.type == kind) != (getattr(self, name) is not None):
                raise wrong(name, f"it must be given with type {kind}, and with no other")
        return self


class GenerationFields(SamplingFields):
    """Fields that completions and chats share."""

    token_limits: ClassVar[tuple[str, ...]] = ("max_tokens",)

    n: Whole = Field(1, ge=1, le=128)
    max_tokens: TokenLimit = Field(None, ge=1)
    stream_options: ChunkOptions | None = None
    response_format: ResponseFormat | None = None
    return_token_sources: bool = False

    @property
    def own_form(self) -> str | None:
        free = self.response_format is None or self.response_format.type == "text"
        return None if free else "response_format"


def _no_logprobs(value: Any) -> Any:
    """Convert false, the value for none in chats, to None."""
    return None if value is False else value


class CompletionBody(GenerationFields):
    """Fields of ``/v1/completions``."""

    prompt: Annotated[list[str | list[int]], BeforeValidator(_prompt)]
    # Default of the OpenAI API. With 0 a prompt is only scored.
    max_tokens: TokenLimit = Field(16, ge=0)
    suffix: str = ""
    echo: bool = False
    logprobs: Annotated[Whole | None, BeforeValidator(_no_logprobs)] = Field(None, ge=0, le=MOST_TOP_LOGPROBS)
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


class ChatBody(GenerationFields, TemplateFields):
    """Fields of ``/v1/chat/completions``."""

    token_limits = ("max_completion_tokens", "max_tokens")

    messages: list[Message] = Field(min_length=1)
    max_completion_tokens: TokenLimit = Field(None, ge=1)
    logprobs: bool = False
    top_logprobs: Whole = Field(0, ge=0, le=MOST_TOP_LOGPROBS)
    tools: list[Tool] = Field(default_factory=list)
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
